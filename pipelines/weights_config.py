"""Where weights come from. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from msgspec import Meta

from accel.errors import ConfigError

WeightsKind = Literal["synthetic", "local", "hub"]

# Kinds that each key says something about.
_BELONGS_TO: dict[str, tuple[WeightsKind, ...]] = {
    "path": ("local",),
    "repo": ("hub",),
    "revision": ("hub",),
    "synthetic_seed": ("synthetic",),
    "verify_checksums": ("local", "hub"),
}


@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """The `weights` node of the configuration.

    kind: `synthetic` draws seeded random weights, `local` reads `path`, `hub` downloads `repo`.
    path: folder of the model: a policy package with variants inside, or a diffusers folder.
    repo: hub id `owner/name`.
    revision: branch, tag or commit; `None` is the repository's default branch.
    verify_checksums: compare the weight file with a policy package's manifest before it is loaded;
        `DiffusersFolder` refuses `False`, as diffusers folders have none.
    """

    kind: WeightsKind
    path: str | None = None
    repo: str | None = None
    revision: str | None = None
    synthetic_seed: Annotated[int, Meta(ge=0)] = 0
    verify_checksums: bool = True

    def check(self, *, size: str) -> None:
        """Refuse what can't be loaded or would have no effect. size: `tiny`, `full` or still `auto`.

        Raises: ConfigError naming the key.
        """
        if size == "tiny" and self.kind != "synthetic":
            raise ConfigError(
                f"size=tiny is for weights=synthetic; weights={self.kind} decide themselves. Use size=auto."
            )
        if self.kind == "local" and not self.path:
            raise ConfigError("weights.path is not set; weights=local needs the folder of the model.")
        if self.kind == "hub" and not self.repo:
            raise ConfigError("weights.repo is not set; weights=hub needs a repository id, owner/name.")
        for field in fields(self):
            kinds = _BELONGS_TO.get(field.name, (self.kind,))
            if self.kind not in kinds and getattr(self, field.name) != field.default:
                raise ConfigError(
                    f"weights.{field.name} has no meaning with weights={self.kind}; "
                    f"use weights={' or '.join(kinds)}."
                )
