"""Names of tensors in checkpoints: those that transformers accepts, those to leave out, and problems with others."""

import re
from collections.abc import Collection, Iterable

from rptrain.models.spec import ModelShape
from rptrain.models.weights import mxfp4

TIED_HEAD = "lm_head.weight"
DECODER = "model."  # the prefix of the decoder, which transformers adds to names, or removes, where they then fit
# What ends the names of buffers that are computed from the config, in old checkpoints.
BUFFERS = tuple(f"rotary_emb.{kind}" for kind in ("inv_freq", "cos_cached", "sin_cached"))
BUFFERS += ("position_ids", ".masked_bias")
# Modules around a model or its layers: of DistributedDataParallel, torch.compile, FSDP, checkpointing and PEFT.
WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_model\.model)\."
)


class Names:
    """The names of a model's tensors in checkpoints, its parameters being named by modules."""

    def __init__(self, spec: ModelShape) -> None:
        self._spec = spec
        parts = [part for unit in spec.units for param in unit.params for part in param.parts]
        stacks = [param.stack.key for unit in spec.units for param in unit.params if param.stack]
        packed = [name for part in parts if part.mxfp4 for name in mxfp4.names(part.key)]
        self._known = {TIED_HEAD, *(part.key for part in parts), *stacks, *packed}
        self._tops = {top for name in self._known for top in name.split(".")[:2]}

    def module_name(self, stored_name: str) -> str:
        """The name among modules of a tensor in a file, where transformers accepts it; else the name as it is."""
        name = self._spec.module_name(stored_name)
        given = (name, name.removeprefix(DECODER), DECODER + name)
        return next((one for one in given if one in self._known), name)

    def is_outside(self, name: str) -> bool:
        """Whether a tensor that the model does not have, by its module name, belongs to no module of the model, such
        as the head of another task. transformers leaves it out, too.
        """
        return name.split(".")[0] not in self._tops

    def problem(self, stored_names: Iterable[str], missing: Collection[str]) -> str | None:
        """Why tensors are missing, if they are there under names of a wrapper or beside an adapter's, and what to do;
        None if they are not.
        """
        names = list(stored_names)
        if adapter := next((name for name in names if ".lora_A." in name or ".base_layer." in name), None):
            return (
                f"there are tensors of an adapter, such as {adapter}: merge it into the model (merge_and_unload of "
                "PEFT) and save that, or set model.path to the base and lora.adapter to the adapter"
            )
        found = {bare: (name, added) for name in names for bare, added in self._unwrapped(name)}
        if not found or not missing or not (found.keys() >= set(missing) or len(found) == len(names)):
            return None
        name, added = next(iter(found.values()))
        return (
            f"the names of tensors contain {added!r}, which a wrapper of the model added, as in {name}, and "
            "transformers does not accept them: save the model without the wrapper, or rename the tensors"
        )

    def _unwrapped(self, name: str) -> list[tuple[str, str]]:
        """The module name of a tensor without what a wrapper added, and this; empty if the model has none."""
        if self.module_name(name) in self._known:
            return []
        bare = {WRAPPERS.sub("", name): "".join(dict.fromkeys(WRAPPERS.findall(name)))}
        bare |= {name[match.end() :]: name[: match.end()] for match in re.finditer(r"\.", name)}
        found = ((self.module_name(inner), added) for inner, added in bare.items())
        return [(inner, added) for inner, added in found if inner in self._known][:1]
