#!/usr/bin/env python3
"""Tidemill's CPU engine beside llama.cpp: same file, same threads, same machine, alternating runs.

The peer is built once from the source package of llama-cpp-python (pinned by hash) with the host's own instructions. Each row
takes the better of the peer's two attention paths (-fa 0 and 1) in each round, and the median over the rounds on both sides. The last columns are the
ratio and what it has to be at least. Usage: make bench-peer, or beside_llama_cpp.py MODEL [--threads 2] [--rounds 3].
"""

import argparse
import hashlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tarfile

VERSION = "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
TOOLS = ("llama-bench", "llama-batched-bench", "llama-server")
# Row of our bench, and the least ratio that the project holds itself to.
ROWS = {
    "prefill:512": 2.2,
    "prefill:4096": 1.9,
    "decode:1@128": 1.8,
    "decode:1@4096": 2.8,
    "decode:8@128": 2.4,
    "decode:32@128": 2.3,
}
N_STEPS = 64


def say(text):
    print(text, file=sys.stderr, flush=True)


def run(command, **more):
    result = subprocess.run(command, check=False, text=True, **more)
    if result.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} ended with status {result.returncode}")
    return result


def build_peer(cache):
    """The directory of the peer's programs; built when it is not there."""
    home = cache / f"llama-cpp-python-{VERSION}"
    programs = home / "build" / "bin"
    if all((programs / tool).exists() for tool in TOOLS):
        return programs
    home.mkdir(parents=True, exist_ok=True)
    archive = home / f"llama_cpp_python-{VERSION}.tar.gz"
    if not archive.exists():
        say(f"fetching the source package of llama-cpp-python {VERSION} (77 MB)")
        run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python",
             "--dest", str(home), f"llama-cpp-python=={VERSION}"])
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SHA256:
        sys.exit(f"{archive}: sha256 is {found}, not {SHA256}; delete it and try again")
    source = home / "source"
    if not source.exists():
        with tarfile.open(archive) as packed:
            packed.extractall(source, filter="data")
    source = source / f"llama_cpp_python-{VERSION}" / "vendor" / "llama.cpp"
    say("building llama.cpp (10 to 20 minutes on 2 cores)")
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_CURL=OFF",
               "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"]
    run(["cmake", "-S", str(source), "-B", str(home / "build"), *options], stdout=subprocess.DEVNULL)
    run(["cmake", "--build", str(home / "build"), "-j", str(os.cpu_count()), "--target", *TOOLS], stdout=sys.stderr)
    return programs


def peer_rate(programs, model, threads, row, flash):
    """Tokens per second of one run of the peer."""
    kind, numbers = row.split(":")
    common = ["-m", model, "-t", str(threads), "-fa", ("off", "on")[flash]]
    if kind == "prefill":
        command = [programs / "llama-bench", *common, "-p", numbers, "-n", "0", "-r", "1", "-o", "json"]
        return json.loads(run(command, capture_output=True).stdout)[0]["avg_ts"]
    streams, context = map(int, numbers.split("@"))
    if streams == 1:
        command = [programs / "llama-bench", *common, "-p", "0", "-n", str(N_STEPS), "-d", str(context), "-r", "1", "-o", "json"]
        return json.loads(run(command, capture_output=True).stdout)[0]["avg_ts"]
    n_context = streams * (context + N_STEPS)
    command = [programs / "llama-batched-bench", *common, "-c", str(n_context), "-npp", str(context),
               "-ntg", str(N_STEPS), "-npl", str(streams), "--output-format", "jsonl"]
    lines = run(command, capture_output=True).stdout.splitlines()
    return next(json.loads(line)["speed_tg"] for line in lines if line.startswith("{"))


def our_rate(program, model, threads, row):
    """Tokens per second of one run of ours."""
    command = [program, model, "--threads", str(threads), "--row", row, "--json"]
    return json.loads(run(command, capture_output=True).stdout)["tokens_per_s"]


def our_program(root):
    """Builds our bench and finds it."""
    command = ["cargo", "bench", "--quiet", "--locked", "-p", "tidemill-engine", "--bench", "model", "--no-run", "--message-format", "json"]
    lines = run(command, cwd=root, stdout=subprocess.PIPE).stdout.splitlines()
    built = [json.loads(line) for line in lines if line.startswith("{")]
    return next(it["executable"] for it in built if it.get("executable") and it["target"]["name"] == "model")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--row", action="append", choices=ROWS, help="one row instead of all; may be given several times")
    arguments = parser.parse_args()
    root = pathlib.Path(__file__).resolve().parents[2]
    home = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    programs = build_peer(pathlib.Path(os.environ.get("TIDEMILL_CACHE") or home / "tidemill"))
    program = our_program(root)
    print(f"{pathlib.Path(arguments.model).name}, {arguments.threads} threads, median of {arguments.rounds} rounds")
    print("| row | llama.cpp | tidemill | ratio | at least |\n|---|---|---|---|---|", flush=True)
    n_short = 0
    for row in arguments.row or ROWS:
        peer, ours = [], []
        for _ in range(arguments.rounds):
            peer.append(max(peer_rate(programs, arguments.model, arguments.threads, row, flash) for flash in (0, 1)))
            ours.append(our_rate(program, arguments.model, arguments.threads, row))
        peer, ours = statistics.median(peer), statistics.median(ours)
        n_short += ours / peer < ROWS[row]
        print(f"| {row} | {peer:.0f} | {ours:.0f} | {ours / peer:.2f} | {ROWS[row]} |", flush=True)
    if n_short:
        say(f"{n_short} rows are below what they should be; measure again on a quiet machine before you believe it")


main()
