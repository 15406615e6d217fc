"""What can be known to be wrong before the first process starts: files, storage, libraries, devices. Each is one error
that says what to do. Nothing is written, and no directory is made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from regrow.checkpoint.chunks import load_zstd
from regrow.checkpoint.storage import Storage
from regrow.config import TrainConfig
from regrow.data.catalog import check_fit
from regrow.errors import ConfigError, UserError

# For a process that loads torch and asks it. Too small: a cold disk counts as a missing device. Too large: the user
# waits for a driver that hangs.
DEVICE_SECONDS_MAX = 120.0
# An answer of its own line: libraries may print, too. The launcher itself never loads torch.
ASK_FOR_DEVICES = "import torch; print('\\ndevices', torch.cuda.device_count() if torch.cuda.is_available() else 0)"


def check_start(config: TrainConfig) -> None:
    """Raises a UserError for the first thing that is missing, or a StorageError if storage does not answer."""
    if config.script:
        check_script(config)
    else:
        path = config.data_path
        if path is not None and not path.exists():
            raise UserError(f"data = {config.data!r}: there is no file {path}")
        check_fit(config)
    if config.merges:  # else they stay in the files of the rows, which the store looks at
        check_storage(config)
    if config.publish is not None and (missing := Storage.open(config.publish).find_missing()) is not None:
        raise ConfigError("publish", config.publish, missing, hint="make it, or name another place")
    if config.device != "cpu":
        check_device(config)


def check_script(config: TrainConfig) -> None:
    """A module is found by whoever runs it, which may have another path."""
    if config.script[0] != "-m" and not Path(config.script[0]).is_file():
        raise UserError(f"there is no script {config.script[0]}")


def check_storage(config: TrainConfig) -> None:
    """Checkpoints can be written where they are to be, in the way they are to be."""
    assert config.ckpt is not None
    if config.ckpt_encoding == "zstd":
        load_zstd()
    missing = Storage.open(config.ckpt).find_missing()
    if missing is not None:
        raise ConfigError("ckpt", config.ckpt, missing, hint="make it, or name another place")


def check_device(config: TrainConfig) -> None:
    count = count_devices()
    wanted = int(config.device.partition(":")[2] or 0)
    if wanted < count:
        return
    found = "this torch finds no CUDA device" if count == 0 else f"there are only {count} CUDA devices, counted from 0"
    hint = "--device cpu, or install a CUDA build of torch" if count == 0 else f"--device cuda:{count - 1}"
    raise ConfigError("device", config.device, found, hint=hint)


def count_devices() -> int:
    """As torch counts them, in a process of its own."""
    command = [sys.executable, "-P", "-c", ASK_FOR_DEVICES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEVICE_SECONDS_MAX, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"torch did not say within {DEVICE_SECONDS_MAX:.0f} s which CUDA devices there are",
            hint="does the driver hang? --device cpu does without",
        ) from None
    answers = [line.split() for line in done.stdout.splitlines() if line.startswith("devices ")]
    if done.returncode or not answers:
        words = done.stderr.strip().splitlines()
        raise UserError(f"torch cannot be loaded: {words[-1] if words else f'exit code {done.returncode}'}")
    return int(answers[-1][1])
