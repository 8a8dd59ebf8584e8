"""Will it work on my model? What is gained, what is lost, with which settings, measured in unmodified llama.cpp, without a
compiler:

    python -m quoka check MODEL.gguf [TEXT ...] [OPTION ...]
    python -m quoka check --estimate MODEL.gguf      # in a second, from the file alone: the most that can be gained
    python -m quoka check --compare DIR DIR ...      # one page of several results

Writes to a folder, check/MODEL unless --out names one: check.html, the page to look at; check.json, all numbers; and, where
something is recommended, settings.json, which QUOKA_CONFIG names. A run that was stopped goes on where it was. Options are
those of examples/bindings/ggml/check.sh; `python -m quoka check --options` lists them.

    --llama-cpp DIR    the folder of llama.cpp's libraries, of the release that this package was built for: libllama, libggml,
                       libggml-base, libggml-cpu*. Unless said otherwise that of GGML_DIR, of a node-llama-cpp installed in
                       this folder, or of the llama-server on the PATH, if it is of that release; else npm fetches them once,
                       11 MB, to ~/.cache/quoka
"""
import base64
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile

from . import plugin

CARRIED = pathlib.Path(__file__).resolve().parent / "check_files"  # placed by examples/packaging/plugin.py, as they lie in the repository
FOLDER = CARRIED / "examples/bindings/ggml"
# Options of the program: those of check.sh.
WITHOUT_VALUE = {"--quick", "--measure-only", "--rounding", "--fresh"}
WITH_VALUE = {"--out", "--json", "--lengths", "--modes", "--arithmetics", "--budgets", "--cache", "--threads", "--ubatch", "--samples", "--questions",
              "--together", "--seed", "--max-perplexity", "--max-kl", "--max-needles", "--min-gain"}
LIBRARY = re.compile(rb"\0((libllama|libggml-base|libggml)(?:\.v([0-9.]+))?\.so[.0-9]*)(?=\0)")


class Refused(Exception):
    """In words, for the user."""


def needed(program):
    """({name: library}, release): what of llama.cpp the program is linked with; of which release, or None where libllama's name does not say so."""
    found = LIBRARY.findall(program.read_bytes())
    release = next((release.decode() for _, library, release in found if library == b"libllama" and release), None)
    return {name.decode(): library.decode() for name, library, _ in found}, release


def release_of(library):
    """What libllama says, such as 0.5.0; None of libraries that say nothing."""
    asks = "import ctypes, sys; version = ctypes.CDLL(sys.argv[1]).llama_version; version.restype = ctypes.c_char_p; print(version().decode())"
    said = subprocess.run([sys.executable, "-c", asks, str(library.resolve())], capture_output=True, text=True)  # apart: a library that cannot be loaded may end it
    return said.stdout.strip().split("-")[0] or None


def linked(folder, names, release, into):
    """Fills `into` with links of the names that the program asks for to the folder's libraries. Raises Refused."""
    for name, library in names.items():
        found = [folder / name] if (folder / name).exists() else sorted(x for x in folder.glob(f"{library}.*") if ".so" in x.name)
        if not found:
            raise Refused(f"{folder} has no {library}")
        if library == "libllama" and release and (other := release_of(found[0])) != release:
            raise Refused(f"{found[0]} is of llama.cpp {other or '(it does not say which)'}, `check` was built for {release}. "
                          "The backend itself serves every ggml of its interface version: python -m quoka plugin")
        (into / name).symlink_to(found[0].resolve())
    cpu = sorted(folder.glob("libggml-cpu*.so*"))
    if not cpu:
        raise Refused(f"{folder} has no libggml-cpu: this llama.cpp is built as one piece, and loads no backends")
    if reason := plugin.refusal(next((x for x in cpu if "x64" in x.name), cpu[0])):  # the one that every processor runs
        raise Refused(reason)


def inside(folder):
    """Where in what a user names the libraries are."""
    return next((x for x in (folder, folder / "lib", folder / "bin", folder / "build/bin") if any(x.glob("libllama*.so*"))), folder)


def found_here():
    """Folders that have llama.cpp's libraries without being named."""
    yield from sorted(pathlib.Path("node_modules/@node-llama-cpp").glob("linux-*/bins/linux-*"))
    if server := shutil.which("llama-server"):
        folder = pathlib.Path(server).resolve().parent
        yield from (x for x in (folder, folder.parent / "lib") if any(x.glob("libllama*.so*")))


def fetched():
    """Libraries of the release, by npm, whose package of them is pinned; kept in ~/.cache/quoka."""
    pin = json.loads((CARRIED / "llama_cpp.json").read_text())
    kept = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "quoka" / pin["tarball"].removesuffix(".tgz")
    if kept.is_dir():
        return kept
    if shutil.which("npm") is None:
        raise Refused(f"no libraries of llama.cpp here, and no npm that could fetch them: --llama-cpp DIR names their folder, or npm install {pin['package']} puts them here")
    print(f"quoka: fetching {pin['package']}, once", file=sys.stderr)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as work:
        work = pathlib.Path(work)
        done = subprocess.run(["npm", "pack", "--loglevel=error", "--cache", str(work / "npm"), "--pack-destination", str(work), pin["package"]], capture_output=True, text=True)
        archive = work / pin["tarball"]
        if done.returncode != 0 or not archive.is_file():
            raise Refused(f"npm could not fetch {pin['package']}: {done.stderr.strip()}")
        if pin["integrity"] != "sha512-" + base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode():
            raise Refused(f"{pin['package']} as it came is not the one that this package was made with")
        (work / "lib").mkdir()
        with tarfile.open(archive) as tar:
            for member in tar:
                if member.isfile() and re.fullmatch(r"package/bins/linux-x64/lib[^/]*\.so", member.name):
                    (work / "lib" / pathlib.Path(member.name).name).write_bytes(tar.extractfile(member).read())
        (work / "lib").rename(kept)
    return kept


def library_folder(named, names, release, into):
    """The folder of llama.cpp's libraries, linked into `into`. Raises Refused, at once where a folder was named."""
    def tried(folder):
        for one in into.iterdir():
            one.unlink()
        linked(folder, names, release, into)
        return folder.resolve()

    if named := named or os.environ.get("GGML_DIR"):
        return tried(inside(pathlib.Path(named)))
    for folder in found_here():
        try:
            return tried(folder)
        except Refused as error:
            print(f"quoka: not taken: {error}", file=sys.stderr)
    return tried(fetched())


def taken(arguments, name):
    """The last value of an option, which is taken out of the list, or None."""
    value = None
    for i in range(len(arguments) - 1, -1, -1):
        if arguments[i] == name or arguments[i].startswith(name + "="):
            _, equals, behind = arguments[i].partition("=")
            if not equals and i + 1 == len(arguments):
                raise Refused(f"{name} is without a value")
            value = value or (behind if equals else arguments[i + 1])
            del arguments[i:i + (1 if equals else 2)]
    return value


def files_in(arguments):
    """The model and texts: what is neither an option nor an option's value. Raises Refused for all that is wrong at once."""
    files, wrong, i = [], [], 0
    while i < len(arguments):
        name, equals, _ = arguments[i].partition("=")
        if not name.startswith("--"):
            files.append(arguments[i])
        elif name not in WITH_VALUE | WITHOUT_VALUE:
            wrong.append(f"{name} is not an option: --options lists them")
            i += not equals and not os.path.isfile(arguments[i + 1] if i + 1 < len(arguments) else "")  # its value is no file that is missing
        elif name in WITHOUT_VALUE and equals:
            wrong.append(f"{name} takes no value")
        elif name in WITH_VALUE and not equals:
            i += 1
            if i == len(arguments):
                wrong.append(f"{name} is without a value")
        i += 1
    wrong += [f"there is no file {one}" for one in files if not os.path.isfile(one)] + ["no MODEL.gguf among the arguments"] * (not files)
    if wrong:
        raise Refused("; ".join(wrong))
    return files


def measure(arguments):
    program = FOLDER / "check"
    if not program.is_file():
        raise Refused(f"this package carries no program `check`: {program} is not there. wheel.sh --llama-cpp makes a wheel that has it, examples/bindings/ggml/check.sh builds it")
    arguments = list(arguments)
    named = taken(arguments, "--llama-cpp")
    options = arguments == ["--options"]
    if options:
        arguments = ["--help"]
    else:
        files, out = files_in(arguments), taken(arguments, "--out")
        out = out or os.path.join("check", pathlib.Path(files[0]).stem)
        if len(files) == 1:
            arguments.append(str(CARRIED / "examples/data/pride_and_prejudice.txt"))
        arguments += ["--out", out]
    with tempfile.TemporaryDirectory() as links:
        names, release = needed(program)
        folder = library_folder(named, names, release, pathlib.Path(links))
        if not options:
            arguments += ["--backend", plugin.there(), "--cpu-backends", str(folder)]
            subprocess.run([sys.executable, FOLDER / "estimate.py", files[0], "--weights"])  # a hint; check says what is wrong with a file
        os.chmod(program, 0o755)  # not all that unpack wheels keep it
        environment = os.environ | {"LD_LIBRARY_PATH": ":".join(filter(None, [links, str(folder), os.environ.get("LD_LIBRARY_PATH")]))}
        status = subprocess.run([program, *arguments], env=environment).returncode
    if status == 0 and not options and "--measure-only" not in arguments:  # the page is of the advice
        status = subprocess.run([sys.executable, FOLDER / "check_page.py", os.path.join(out, "check.json")]).returncode
    return status


def main(arguments):
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    try:
        if not CARRIED.is_dir():
            raise Refused(f"this package carries nothing to check models with: {CARRIED} is not there. wheel.sh --llama-cpp makes a wheel that has it, examples/bindings/ggml/check.sh builds it")
        if arguments[0] == "--estimate":
            return subprocess.run([sys.executable, FOLDER / "estimate.py", *arguments[1:]]).returncode
        if arguments[0] == "--compare":
            pages = [os.path.join(one, "check.json") for one in arguments[1:]]
            missing = [one for one in pages if not os.path.isfile(one)]
            if missing or not pages:
                raise Refused("--compare wants folders of results: " + ("; ".join(f"there is no file {one}" for one in missing) or "none is given"))
            os.makedirs("check", exist_ok=True)
            return subprocess.run([sys.executable, FOLDER / "check_page.py", *pages, "--out", os.path.join("check", "comparison.html")]).returncode
        return measure(arguments)
    except (Refused, FileNotFoundError, ValueError) as error:
        print(f"quoka: {error}", file=sys.stderr)
        return 2
