#!/usr/bin/env python3
"""llama-server with the backend, by a real HTTP client: several slots, cancelled requests, reuse of prompts, shifts of
the context; the answers of llama.cpp alone in exact mode; in a selecting mode those of the same request without
neighbours. With --minutes a soak, whose memory must stay flat.

  server_test.py --server llama-server --backend libggml-quoka.so --model model.gguf [--text FILE] [--minutes 30]

Prints a line per check, and writes measurements as JSON (--json FILE). Returns 1 if a check
failed."""

import argparse
import concurrent.futures
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("--server", required=True)
arguments.add_argument("--backend", required=True)
arguments.add_argument("--model", required=True)
arguments.add_argument("--text", required=True, help="prompts are taken from it")
arguments.add_argument("--requests", type=int, default=50)
arguments.add_argument("--longest", type=int, default=1200, help="characters of a prompt")
arguments.add_argument("--predict", type=int, default=12, help="tokens of an answer")
arguments.add_argument("--budget", type=int, default=64)
arguments.add_argument("--mode", default="recommended")
arguments.add_argument("--threads", type=int, default=2)
arguments.add_argument("--tie", type=float, default=0.05, help="nats between two tokens that may change places")
arguments.add_argument("--bytes", action="store_true", help="the model's tokens 3 to 258 are bytes: answers in ASCII")
arguments.add_argument("--part", default="", help="exact_mode, neighbours or cancelled_reused_shifted alone")
arguments.add_argument("--minutes", type=float, default=0)
arguments.add_argument("--json", default="")
args = arguments.parse_args()

LLAMA = ["-fa", "on", "-b", "512", "-ub", "512", "--no-warmup", "-t", str(args.threads)]


class Server:
    """One llama-server, with these environment variables; backend False: llama.cpp alone."""

    def __init__(self, *options, backend=True, **settings):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("QUOKA_", "GGML_", "LLAMA_"))}
        environment.update({"QUOKA_" + k.upper(): str(v) for k, v in settings.items()})
        if backend:
            environment["GGML_BACKEND_PATH"] = os.path.abspath(args.backend)
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        command = [args.server, "-m", args.model, "--host", "127.0.0.1", "--port", str(self.port), *LLAMA, *options]
        self.process = subprocess.Popen(command, env=environment, stdout=self.log, stderr=self.log)
        self.until(lambda: self.get("/health").get("status") == "ok", 120, "health")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def said(self):
        with open(self.log.name, errors="replace") as log:
            return log.read()

    def until(self, holds, seconds, what):
        end = time.time() + seconds
        while time.time() < end:
            if self.process.poll() is not None:
                raise RuntimeError("llama-server ended:\n" + self.said()[-3000:])
            try:
                if holds():
                    return
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(0.05)
        raise RuntimeError(f"no {what} within {seconds} s:\n" + self.said()[-3000:])

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise RuntimeError("llama-server did not end in 60 s") from None
        return self.process.returncode

    def request(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return json.loads(answer.read())
        finally:
            connection.close()

    def get(self, path):
        return self.request("GET", path)

    def ask(self, prompt, predict=None, **more):
        """Tokens, and for each the log-probabilities of the likeliest 40."""
        body = {"prompt": prompt, "n_predict": predict or args.predict, "temperature": 0, "n_probs": 40, "seed": 1,
                "return_tokens": True, "cache_prompt": False, "ignore_eos": True, **more}
        if args.bytes:
            body["logit_bias"] = [[token, False] for token in range(3 + 128, 3 + 256)]
        answer = self.request("POST", "/completion", body)
        if "tokens" not in answer:
            raise RuntimeError(f"no answer: {answer}")
        best = [{x["id"]: x["logprob"] for x in at["top_logprobs"]} for at in answer["completion_probabilities"]]
        return {"tokens": answer["tokens"], "best": best, "cached": answer["timings"].get("cache_n", 0),
                "read": answer["timings"]["prompt_n"], "seconds": answer["timings"]["prompt_ms"] / 1000}

    def tokens(self, prompt):
        return self.request("POST", "/tokenize", {"content": prompt})["tokens"]

    def ask_at_once(self, prompts):
        """One request of several prompts, as tokens, which all slots begin together."""
        body = {"prompt": prompts, "n_predict": args.predict, "temperature": 0, "n_probs": 40, "seed": 1,
                "return_tokens": True, "cache_prompt": False, "ignore_eos": True}
        return [{key: x[key] for key in ("tokens", "completion_probabilities")} for x in
                sorted(self.request("POST", "/completion", body), key=lambda x: x["index"])]

    def ask_all(self, prompts, at_once, **more):
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda prompt: self.ask(prompt, **more), prompts))

    def idle(self):
        return not any(slot["is_processing"] for slot in self.get("/slots"))

    def resident(self):
        with open(f"/proc/{self.process.pid}/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024


failures = []
measured = {}


def check(holds, what):
    print(("ok    " if holds else "FAILED ") + what, flush=True)
    if not holds:
        failures.append(what)


def compare(given, wanted):
    """'same', 'tie' where they part at tokens that are about as likely, or how far they are apart in nats."""
    for i, (a, b) in enumerate(zip(given["tokens"], wanted["tokens"])):
        if a != b:
            gap = wanted["best"][i][b] - wanted["best"][i].get(a, -100)
            return "tie" if abs(gap) < args.tie else f"apart by {gap:.2f}"
    return "same" if len(given["tokens"]) == len(wanted["tokens"]) else "cut short"


def count(given, wanted):
    kinds = [compare(a, b) for a, b in zip(given, wanted)]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds), reverse=True)}


text = open(args.text, encoding="utf-8", errors="replace").read()
rng = random.Random(7)


def some_prompts(n, longest=None, least=20):
    lengths = [rng.randint(least, longest or args.longest) for _ in range(n)]
    starts = [rng.randrange(0, max(1, len(text) - length)) for length in lengths]
    return [text[a:a + n] for a, n in zip(starts, lengths)]


def exact_mode(prompts):
    """The answers of llama.cpp alone, token by token."""
    slots = ["-np", "4", "-c", str(4 * 4096)]
    with Server(*slots, backend=False) as plain:
        wanted = plain.ask_all(prompts, 4)
        again = plain.ask_all(prompts[::-1], 4)[::-1]
        measured["llama.cpp alone, asked again in another order"] = count(again, wanted)
    with Server(*slots) as exact:
        given = exact.ask_all(prompts, 4)
        check("exact attention" in exact.said(), "the log says the mode")
        check(exact.stop() == 0, "the server ends as asked")
    kinds = measured["exact mode beside llama.cpp alone"] = count(given, wanted)
    check(kinds.get("same", 0) + kinds.get("tie", 0) == len(prompts) and kinds.get("tie", 0) <= len(prompts) // 5 + 2,
          f"{len(prompts)} requests on 4 slots: exact mode answers as llama.cpp alone: {kinds}")


def neighbours(prompts):
    """In a selecting mode an answer does not depend on what lies in the other slots; once with a thread more."""
    prompts = [p for p in prompts if len(p) > args.longest // 2 + 20][:6]
    selecting = {"mode": args.mode, "budget": args.budget}
    for name, options in (("one cache for all", ["-kvu"]), ("a cache for each slot", ["-t", str(args.threads + 1)])):
        with Server("-np", "4", "-c", str(4 * 4096), *options, **selecting) as server:
            lengths = [600, 430, 250, 380]
            first = [server.tokens(p)[:n] for p, n in zip(prompts, lengths)]
            others = first[:1] + [server.tokens(p)[-n:] for p, n in zip(prompts, lengths)][1:]
            one, two = server.ask_at_once(first), server.ask_at_once(others)
            check(one[0] == two[0] and one[1] != two[1],
                  name + ": the same answer and probabilities whatever three busy neighbours are asked")
            alone = [server.ask(p, id_slot=0) for p in prompts]
            check("selected" in server.said(), name + ": the log says that layers select")
            for slot in (1, 2, 3):
                server.ask(some_prompts(1)[0], id_slot=slot, cache_prompt=True)
            beside = [server.ask(p, id_slot=0) for p in prompts]
            check(all(a["tokens"] == b["tokens"] and a["best"] == b["best"] for a, b in zip(alone, beside)),
                  name + ": the same answers and probabilities, to the last digit, beside three full slots")
            busy = server.ask_all(prompts, 4)
            measured[name + ", four slots at work beside one"] = count(busy, alone)
            server.stop()
            once = server.said().count("quoka: layer")
            check(0 < once <= 12, f"{name}: {once} lines say which layers select")
            check("attention that selected took" in server.said(), name + ": what was saved is said at the end")


def cancelled_reused_shifted():
    for mode, settings in (("exact", {}), (args.mode, {"mode": args.mode, "budget": args.budget})):
        with Server("-np", "2", "-c", "2048", "-kvu", "--context-shift", **settings) as server:
            for _ in range(3):  # a client that goes away
                connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
                connection.request("POST", "/completion", json.dumps(
                    {"prompt": some_prompts(1)[0], "n_predict": 100000, "stream": True, "ignore_eos": True}))
                connection.getresponse().read(64)
                connection.sock.close()
                connection.close()
            server.until(server.idle, 30, "idle slots after cancelled requests")
            check(True, f"{mode}: cancelled requests free their slots")
            prompt = some_prompts(1, least=args.longest - 1)[0]
            fresh = server.ask(prompt + text[:40])
            server.ask(prompt, cache_prompt=True, id_slot=1)
            reused = server.ask(prompt + text[:40], cache_prompt=True, id_slot=1)
            check(reused["cached"] > fresh["read"] // 2 and reused["read"] < fresh["read"] // 4,
                  f"{mode}: of {fresh['read']} tokens {reused['cached']} were reused")
            if mode == "exact":
                check(compare(reused, fresh) in ("same", "tie"), "exact: the same answer from a reused prompt")
            shifted = server.ask(some_prompts(1, 300)[0], predict=2600)
            check(len(shifted["tokens"]) == 2600, f"{mode}: an answer longer than the context, which shifts")
            check(server.stop() == 0, f"{mode}: the server ends as asked")


def soak(minutes):
    """Mixed requests; memory is looked at when all slots are idle."""
    end, memory, asked = time.time() + 60 * minutes, [], 0
    with Server("-np", "4", "-c", str(4 * 2048), "-kvu", "--context-shift", "-cram", "0", mode=args.mode, budget=args.budget) as server:
        while time.time() < end:
            answers = server.ask_all(some_prompts(12), 4, cache_prompt=True)
            asked += len(answers)
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            connection.request("POST", "/completion", json.dumps(
                {"prompt": some_prompts(1)[0], "n_predict": 4000, "stream": True, "ignore_eos": True}))
            connection.getresponse().read(16)
            connection.close()
            server.until(server.idle, 60, "idle slots")
            memory.append(server.resident())
        server.stop()
    third = max(1, len(memory) // 3)
    first, last = max(memory[:third]), max(memory[-third:])
    measured["soak"] = {"minutes": minutes, "requests": asked, "MiB": [round(x, 1) for x in memory[:: max(1, len(memory) // 20)]]}
    check(last < 1.03 * first + 8, f"{asked} requests in {minutes} minutes: {first:.0f} MiB at most in the first third, {last:.0f} in the last")


def main():
    started = time.time()
    prompts = some_prompts(args.requests)
    parts = {"exact_mode": lambda: exact_mode(prompts), "neighbours": lambda: neighbours(prompts),
             "cancelled_reused_shifted": cancelled_reused_shifted}
    for part in [args.part] if args.part else parts:
        parts[part]()
    if args.minutes:
        soak(args.minutes)
    print(json.dumps(measured, indent=1))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(measured, file, indent=1)
            file.write("\n")
    print(f"{len(failures)} of the checks failed; {time.time() - started:.0f} s")
    return 1 if failures else 0


sys.exit(main())
