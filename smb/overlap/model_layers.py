"""The layers of a model, found in its first steps, and the parts of a cut that each layer needs.

A layer is a called module with the trained parameters that it uses. Layers are in the order in which their modules are
first called.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from smb.overlap.parts import Cut, Part
from smb.overlap.plan import LayerRuns
from smb.train.ledger import Run


class ModelLayers:
    """The layers of one model. `layer_runs` is empty until `find` has been called."""

    def __init__(self, model: torch.nn.Module, runs: dict[torch.Tensor, Run]) -> None:
        """`runs` has the place of each trained parameter in the exchanged vector."""
        self.runs = runs
        self.layer_runs: list[LayerRuns] = []  # by layer: where its parameters lie in the vector
        self.needed: dict[torch.nn.Module, list[torch.Tensor]] = {}  # the parameters that a call of the module uses
        self.by_parameter: dict[torch.Tensor, int] = {}  # the layer of each parameter
        self._model = model
        self._own = {  # trained parameters of each module, without those of the modules inside it
            module: [each for each in module.parameters(recurse=False) if each in runs] for module in model.modules()
        }
        self._called: dict[torch.nn.Module, None] = {}  # in the order of the first calls

    def knows(self, module: torch.nn.Module) -> bool:
        """Return True if a module is one of the model's. A copy by copy.copy shares the module's hooks, but is not one
        of them.
        """
        return module in self._own

    def uses_parameters(self, module: torch.nn.Module) -> bool:
        """Return True if a call of this module uses trained parameters itself."""
        return bool(self._own[module]) or module in self.needed

    def note_call(self, module: torch.nn.Module) -> None:
        """Remember that a module was called, until the layers are found."""
        if not self.layer_runs:
            self._called.setdefault(module)

    def find(self) -> None:
        """Divide the parameters among the modules that were called, in the order of their first calls. Parameters of a
        module that was not called itself belong to the nearest enclosing module that was.
        """
        first = next(iter(self._called), self._model)
        needed: dict[torch.nn.Module, list[torch.Tensor]] = {module: [] for module in self._called}

        def walk(module: torch.nn.Module, around: torch.nn.Module) -> None:
            if module in self._called:
                around = module
            needed.setdefault(around, []).extend(self._own[module])
            for child in module.children():
                walk(child, around)

        walk(self._model, first)
        taken: set[torch.Tensor] = set()
        for module, parameters in needed.items():
            if parameters:
                self.needed[module] = list(dict.fromkeys(parameters))
            if new := [each for each in self.needed.get(module, ()) if each not in taken]:
                self._add_layer(new)
                taken.update(new)

    def _add_layer(self, parameters: list[torch.Tensor]) -> None:
        runs = sorted((self.runs[each] for each in parameters), key=lambda run: run.here)
        for each in parameters:
            self.by_parameter[each] = len(self.layer_runs)
        self.layer_runs.append(LayerRuns(tuple(runs)))

    @property
    def by_module(self) -> dict[torch.nn.Module, int]:
        """The layer of each module that uses parameters."""
        return {module: self.by_parameter[needed[0]] for module, needed in self.needed.items()}


class LayerParts:
    """The parts of a cut that each module and each parameter needs. Made anew when the cut
    changes or layers are found.
    """

    def __init__(self, layers: ModelLayers, cut: Cut) -> None:
        self._cut = cut
        pulls, pushes = (_PartRanges(parts) for parts in (cut.pull, cut.push))
        # By parameter: the pulled parts that contain some of it, and the pushed parts.
        self.pulls_of = {each: set(pulls.overlapping(run)) for each, run in layers.runs.items()}
        self.pushes_of = {each: sorted(set(pushes.overlapping(run))) for each, run in layers.runs.items()}
        # By module: the pulled parts that it needs, the most urgent first.
        self.pulls: dict[torch.nn.Module, list[int]] = {}
        for module, needed in layers.needed.items():
            numbers = set().union(*(self.pulls_of[each] for each in needed))
            self.pulls[module] = sorted(numbers, key=lambda number: -cut.pull[number].urgency)

    def gradients_needed(self) -> list[int]:
        """Return how many parameters must have their gradients before each pushed part can be made."""
        counts = [0] * len(self._cut.push)
        for parameter, numbers in self.pushes_of.items():
            if parameter.requires_grad:
                for number in numbers:
                    counts[number] += 1
        return counts


class _PartRanges:
    """The ranges of all parts' elements in the vector."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._ranges = sorted(
            (run.here, run.here + run.count, number) for number, part in enumerate(parts) for run in part.runs
        )

    def overlapping(self, run: Run) -> Iterator[int]:
        """Yield the numbers of the parts that have elements of a run."""
        for begin, end, number in self._ranges:
            if begin < run.here + run.count and run.here < end:
                yield number
