"""smb.torch.join: the call by which a model joins a training."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

import smb
import smb.train
from smb.errors import InvalidArgumentError
from smb.torch.tensor_values import lasting
from smb.torch.training.exchanges import check_overlap
from smb.torch.training.shared_model import Shared


@lasting
def join(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    name: str,
    *,
    scheme: str | smb.train.Scheme | None = None,
    coordinator: str | None = None,
    client: smb.Client | None = None,
    samples: int | None = None,
    guards: smb.train.Guards | None = None,
    lease: float | None = None,
    fresh: bool = False,
    servers: Any = None,
    stripe: Any = None,
    wire: str | None = None,
    replicas: int | None = None,
    mesh: Any = None,
    overlap: str = "none",
    **settings: Any,
) -> Shared:
    """Train the model together with all processes that join the same name. Returns when the model has the shared
    values.

    ```python
    shared = smb.torch.join(model, optimizer, "digits", scheme="localsgd", every=20)
    for batch in shared.batches(len(images), 32, epochs=1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    shared.close()
    ```

    The first process that joins makes the group, with its model's values. Later ones get the current values. After each
    optimizer.step() the scheme may exchange: it blocks as the scheme says, and changes the parameters in place. A step
    without an exchange takes no time that grows with the model.

    - `optimizer` must have all parameters that require gradients. If there are several optimizers, pass the one that
      steps last. A wrapper (Accelerate's, Lightning's) is followed by its `.optimizer`.
    - `scheme` is a scheme of smb.train, or the name of one with its settings as further arguments. Settings that are
      left out are the group's, or the defaults if there is no group. None adopts all of the group's.
    - `coordinator` is an address (default: $SMB_COORDINATOR, else 127.0.0.1:7070). Or pass a `client`, which stays
      open.
    - `samples` is the number of samples that a step trains. Statistics count them, and with token_weights=True they are
      the weight of a contribution. None: samples are not counted. Shared.batches() sets it; set `samples` of the result
      if you make batches yourself.
    - `fresh=True` begins anew: it deletes a training of this name in which nobody is alive.
    - `guards`, `lease`, `servers`, `stripe`, `wire` and `replicas` are those of smb.train.join.
    - `mesh`, a torch.distributed DeviceMesh, makes its ranks one member. Each rank calls join() with a client of its
      own, and moves its own shards: DTensors of fully_shard or parallelize_module, and tensors that all ranks have
      alike, as with DDP. Rank 0 of the mesh runs the scheme for all. All ranks step, and call methods of the result,
      together. If one of them dies, the member dies.
    - `overlap` hides the exchanges of ASP, SSP, R2SP and BSP behind the forward and backward passes (docs/training.md).
      With "forward" the script stays as it is: optimizer.step() returns at once, and each module waits for its own
      parameters when it is called. "both" also steps the optimizer in the backward pass, parameter by parameter. It
      raises Error where that would give wrong results: clipping, accumulation, closures, GradScaler. Errors of an
      exchange are raised by the next call of a module, or by the optimizer's next step. Not with mesh=, nor with a
      compiled model.

    The model may be on any device, compiled, or in DistributedDataParallel. Its trained parameters are float32,
    bfloat16 or float16.

    Raises InvalidArgumentError if the model cannot be shared or already is, or if settings or tensors differ from the
    group's. Raises NotFoundError if there is no group and no scheme is given, AlreadyExistsError with fresh=True if
    others are alive, and smb's other errors if the cluster fails. The model then has its former values, and nothing of
    this join remains. Afterwards optimizer.step() raises smb.train.RefusedContributionError if a guard refuses a
    contribution (for example NaN): the model is the shared one again, and the optimizer's state unchanged. It raises
    NotFoundError if the training was deleted; close() succeeds then.
    """
    if client is not None and coordinator is not None:
        raise InvalidArgumentError("smb.torch.join: pass coordinator= or client=, not both")
    if settings and not isinstance(scheme, str):
        raise InvalidArgumentError(
            f"smb.torch.join: {', '.join(settings)}: settings of a scheme need its name, as in "
            f'scheme="localsgd", every=20; give a scheme object its settings itself'
        )
    inner = _unwrapped(optimizer)
    if not isinstance(model, torch.nn.Module) or inner is None:
        raise InvalidArgumentError(
            f"smb.torch.join: pass the model first, then the optimizer, not {type(model).__name__} and "
            f"{type(optimizer).__name__}"
        )
    check_overlap(overlap, mesh=mesh is not None)
    placement = {"servers": servers, "stripe": stripe, "wire": wire, "replicas": replicas}
    options: dict[str, Any] = {key: value for key, value in placement.items() if value is not None}
    with contextlib.ExitStack() as on_failure:
        if client is None:
            client = on_failure.enter_context(smb.connect(coordinator))
        options |= {"guards": guards, "lease": lease, "fresh": fresh}
        if mesh is None:
            options["overlap"] = overlap
            shared = Shared(model, inner, name, scheme, settings, client, samples, options)
        else:
            from smb.torch.meshes.mesh import MeshShared  # importing torch.distributed.tensor takes a second

            shared = MeshShared(model, inner, name, scheme, settings, client, samples, options, mesh)
        shared.owned = on_failure.pop_all()
    return shared


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer whose step() is called in the end. Wrappers have it as `.optimizer`."""
    seen: list[Any] = []
    while not any(optimizer is each for each in seen) and hasattr(optimizer, "optimizer"):
        seen.append(optimizer)
        optimizer = optimizer.optimizer
    hooked = isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "_optimizer_step_post_hooks")
    return optimizer if hooked else None
