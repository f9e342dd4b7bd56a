"""Checkpoints in the layout of diffusers: `model_index.json` and one subfolder a component.

Knows no model: which classes are taken, and how a module is made of its config, the caller says.
Nothing is read but JSON, tokenizer files and safetensors; no code of a repository is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from accel.errors import CheckpointError, ConfigError
from pipelines.checkpoint import Checkpoint, check_fit, load_into, open_checkpoint
from pipelines.hub import Hub, HubId
from pipelines.library_config import check_values
from pipelines.module_building import ModuleFactory, build_modules
from pipelines.progress import NULL_PROGRESS, Progress
from pipelines.strict_json import read_json_object
from pipelines.weights_config import WeightsConfig

INDEX = "model_index.json"
_WEIGHTS = "diffusion_pytorch_model.safetensors"


@dataclass(frozen=True, kw_only=True)
class ModuleSpec:
    """How one component with weights is recognised, made and filled.

    class_name: what `model_index.json` must call it. build: content of its config.json -> module, called
        while parameters go to the meta device. A module may be less than the named class.
    prefixes: what the checkpoint may put before the module's names, the likeliest first.
    ignore: beginnings of full checkpoint names that may stay unused.
    wanted_by: the setting that asks for a component which is no part of the pipeline, so that
        `model_index.json` need not name it; empty for the pipeline's own.
    library_class: the class of diffusers whose parameters config.json gives; `None` if it is of another
        library.
    """

    class_name: str
    build: Callable[[dict[str, Any]], nn.Module]
    prefixes: tuple[str, ...] = ("",)
    ignore: tuple[str, ...] = ()
    wanted_by: str = ""
    library_class: Any = None

    @classmethod
    def of(cls, library_class: Any, *, wanted_by: str = "") -> ModuleSpec:
        """A component that is all of a diffusers class."""
        return cls(
            class_name=library_class.__name__,
            build=library_class.from_config,
            wanted_by=wanted_by,
            library_class=library_class,
        )


@dataclass(frozen=True, kw_only=True)
class DiffusersFolder:
    """An opened `model_index.json`. root: local folder, or the hub id with its revision pinned.

    origin: where it came from, for people.
    """

    root: Path | HubId
    index: Mapping[str, Any]
    origin: str
    hub: Hub

    @classmethod
    def open(
        cls, weights: WeightsConfig, *, pipelines: Sequence[str], hub: Hub | None = None
    ) -> DiffusersFolder:
        """Read the index that `weights` (local or hub) names.

        pipelines: pipeline classes that are taken. Raises: ConfigError for a setting that has no meaning for
        such a folder, CheckpointError if there is no index or it is of another pipeline.
        """
        if not weights.verify_checksums:
            raise ConfigError(
                "weights.verify_checksums=false has no effect: diffusers folders have no checksums. Drop it."
            )
        hub = hub or Hub()
        root: Path | HubId
        if weights.kind == "local":
            root = Path(expanduser(weights.path or ""))
            file, origin = root / INDEX, str(root)
            if not root.is_dir():
                raise CheckpointError(f"{root}: no such folder. Check the path that weights names.")
        else:
            repo = HubId(weights.repo or "", None, weights.revision)
            file, origin = hub.file(HubId(repo.repo, INDEX, repo.revision)), str(repo)
            # One commit for all components: a branch may move between two downloads.
            root = HubId(repo.repo, None, file.parent.name)
        if not file.is_file():
            raise CheckpointError(
                f"{origin}: no {INDEX} in it. Name a folder in the layout of diffusers, with one subfolder "
                "for each component."
            )
        index = read_json_object(file)
        if index.get("_class_name") not in pipelines:
            raise CheckpointError(
                f"{file}: is of the pipeline {index.get('_class_name')!r}, this model needs "
                f"{' or '.join(pipelines)}. Choose the model that fits these weights."
            )
        return cls(root=root, index=index, origin=origin, hub=hub)

    def class_name(self, name: str) -> Any:
        """What the index says that a component is; `None` if it does not."""
        entry = self.index.get(name)
        return entry[1] if isinstance(entry, list) and len(entry) == 2 else None

    def subfolder(self, name: str, *, classes: Sequence[str], wanted_by: str = "") -> Path:
        """The folder of a component, downloaded if it comes from the hub.

        classes: class names that are taken. wanted_by: see `ModuleSpec`.
        Raises: CheckpointError if the index lacks it, names another class, or the folder is missing.
        """
        class_name = self.class_name(name)
        if class_name not in classes and not (wanted_by and class_name is None):
            found = f"is {class_name!r}" if class_name else "is missing"
            raise CheckpointError(
                f"{self.origin}: component '{name}' {found} in {INDEX}, expected {' or '.join(classes)}. "
                "Fetch the folder again or choose the model that fits it."
            )
        if isinstance(self.root, HubId):
            return self.hub.folder(HubId(self.root.repo, name, self.root.revision))
        folder = self.root / name
        if not folder.is_dir() and wanted_by:
            raise CheckpointError(
                f"{folder}: no such folder, but {wanted_by} needs it. Fetch '{name}' of the release into "
                f"{self.root}, or leave {wanted_by} out."
            )
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder}: component '{name}' of {INDEX} has no folder. "
                "The download may be incomplete: fetch the missing files again."
            )
        return folder

    def tokenizer(self, name: str, *, classes: Sequence[str]) -> Any:
        """A transformers tokenizer. Raises: CheckpointError."""
        folder = self.subfolder(name, classes=classes)
        try:
            return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers raises many kinds for missing and damaged files
            raise CheckpointError(
                f"{folder}: no usable tokenizer ({error}). Fetch the folder again."
            ) from error

    def scheduler(self, name: str, scheduler_class: Any) -> Any:
        """A diffusers scheduler of exactly that class. Raises: CheckpointError, also for one that draws noise
        in every step or runs from picture to noise, which no pipeline here does."""
        folder = self.subfolder(name, classes=(scheduler_class.__name__,))
        file = folder / "scheduler_config.json"
        config = read_json_object(file)
        check_values(config, scheduler_class, file)
        for option, does in (("stochastic_sampling", "draws noise"), ("invert_sigmas", "runs backwards")):
            if config.get(option):
                raise CheckpointError(f'{file}: the scheduler {does}. Set "{option}": false in it.')
        return _made(folder, lambda: scheduler_class.from_config(config))


def load_components(
    folder: DiffusersFolder,
    specs: Mapping[str, ModuleSpec],
    *,
    check: Callable[[Mapping[str, nn.Module]], None] = lambda modules: None,
    working_memory: Callable[[Mapping[str, nn.Module]], Mapping[str, int]] = lambda modules: {},
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress = NULL_PROGRESS,
) -> dict[str, nn.Module]:
    """Load every component that `specs` names, ready for inference on `device`.

    check: looks at all modules, still without memory, for sizes that do not meet; raises CheckpointError.
    working_memory: as `build_modules` takes it.
    dtype: of parameters, whatever floating dtype the files have.
    Raises: CheckpointError for components that are missing, damaged or do not fit, before anything is
        allocated where configs and headers tell; DeviceMemoryError.
    """
    folders = {
        name: folder.subfolder(name, classes=(spec.class_name,), wanted_by=spec.wanted_by)
        for name, spec in specs.items()
    }
    factories = {name: _factory(folders[name], spec) for name, spec in specs.items()}
    checkpoints = {name: _open_weights(path) for name, path in folders.items()}

    def check_all(modules: Mapping[str, nn.Module]) -> None:
        check(modules)
        for name, module in modules.items():
            check_fit(*_fitting(checkpoints[name], module, specs[name]), ignore=specs[name].ignore)

    def fill(name: str, module: nn.Module) -> None:
        load_into(*_fitting(checkpoints[name], module, specs[name]), ignore=specs[name].ignore)

    return build_modules(
        factories,
        fill=fill,
        check=check_all,
        working_memory=working_memory,
        dtype=dtype,
        device=device,
        progress=progress,
    )


def _factory(folder: Path, spec: ModuleSpec) -> ModuleFactory:
    file = folder / "config.json"
    config = read_json_object(file)
    named = config.get("_class_name") or next(iter(config.get("architectures") or ()), spec.class_name)
    if named != spec.class_name:
        raise CheckpointError(
            f"{file}: is of the class {named!r}, {INDEX} says {spec.class_name}. Fetch the folder again."
        )
    if spec.library_class is not None:
        check_values(config, spec.library_class, file)
    return lambda: _made(file, lambda: spec.build(config))


def _made(where: Path, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    except Exception as error:  # the libraries validate configs with several kinds
        raise CheckpointError(f"{where}: not a usable configuration ({error}). Fetch it again.") from error


def _open_weights(folder: Path) -> Checkpoint:
    """Like the libraries: an index before a single file, and that by its own name."""
    single = folder / _WEIGHTS
    has_index = any(folder.glob("*.safetensors.index.json"))
    return open_checkpoint(single if single.is_file() and not has_index else folder)


def _fitting(
    checkpoint: Checkpoint, module: nn.Module, spec: ModuleSpec
) -> tuple[Checkpoint, dict[str, Tensor]]:
    """The checkpoint, and the module's tensors by the names that this file gives them."""
    slots = module.state_dict()
    first = next(iter(slots))
    spelled = (prefix for prefix in spec.prefixes if prefix + first in checkpoint.entries)
    prefix = next(spelled, spec.prefixes[0])
    return checkpoint, {prefix + name: slot for name, slot in slots.items()}
