"""The one JSON file of a comparison: finished rows stay in it and are not measured again."""

import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys


def cpu_name():
    """With family and model if Linux gives them: one name can stand for several generations."""
    info = pathlib.Path("/proc/cpuinfo")
    data = dict(re.findall(r"^(model name|cpu family|model)\s*: (.+)$", info.read_text(), re.MULTILINE)) if info.exists() else {}
    if "model name" not in data:
        return platform.processor()
    return data["model name"] + (", family {}, model {}".format(data["cpu family"], data["model"]) if "cpu family" in data else "")


def commit():
    """This library's, with a + where files differ from it; "" outside of a checkout."""
    here = pathlib.Path(__file__).parent
    done = subprocess.run(["git", "describe", "--always", "--dirty=+", "--exclude=*"], cwd=here, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def quartiles(values):
    """[first, median, third]."""
    return [float(f"{x:.5g}") for x in statistics.quantiles(values if len(values) > 1 else [*values, *values], method="inclusive")]


class Record:
    def __init__(self, path):
        self.path = pathlib.Path(path)
        self.content = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.content.setdefault("machine", {"cpu": cpu_name(), "processors": os.cpu_count(), "python": platform.python_version()})
        if self.content["machine"]["cpu"] != cpu_name():
            sys.exit(f"{path} is of another machine: {self.content['machine']['cpu']}, this is {cpu_name()}")

    def part(self, name, default):
        return self.content.setdefault(name, default)

    def find(self, part, key):
        """The row of a list whose values are those of `key`, or None."""
        return next((row for row in self.part(part, []) if all(row.get(name) == value for name, value in key.items())), None)

    def put(self, part, key, row):
        """Adds a row, or takes the place of the one with the same key."""
        old = self.find(part, key)
        if old is not None:
            self.part(part, []).remove(old)
        self.part(part, []).append({**key, **row})
        self.save()

    def save(self):
        new = self.path.with_suffix(".new")
        new.write_text(as_text(self.content) + "\n")
        os.replace(new, self.path)


def as_text(value, indent=0, room=150):
    """Readable JSON: a value that fits on a line is on one."""
    line = json.dumps(value)
    if len(line) + indent <= room or not isinstance(value, (dict, list)) or not value:
        return line
    pad = " " * (indent + 1)
    if isinstance(value, dict):
        parts = [f"{pad}{json.dumps(key)}: {as_text(one, indent + 1, room)}" for key, one in value.items()]
        return "{\n" + ",\n".join(parts) + "\n" + " " * indent + "}"
    return "[\n" + ",\n".join(pad + as_text(one, indent + 1, room) for one in value) + "\n" + " " * indent + "]"
