"""The room of trainings: schemes by which workers that come and go share one model, through the box. It uses what
users import, and smb.spi.

```python
worker = smb.train.join(client, "run", values, smb.train.LocalSGD(every=50))
for batch in batches:
    values -= rate * gradient(values, batch)
    worker.step(samples=len(batch))
worker.close()
```

Independent of frameworks: `values` is a flat float32 array. docs/schemes.md compares the schemes.
"""

from smb.train.asyncdiloco import AsyncDiLoCo
from smb.train.bsp import BSP
from smb.train.diloco import DiLoCo
from smb.train.elastic import EAMSGD, EASGD, SEASGD, nesterov_step
from smb.train.group import shared
from smb.train.group_deletion import delete
from smb.train.guards import Guards, RefusedContributionError
from smb.train.localsgd import LocalSGD
from smb.train.members import MembershipLostError
from smb.train.metrics import Collector
from smb.train.progress import ExchangeEvent, Progress
from smb.train.rare import HSGD, R2SP
from smb.train.saved import load, save
from smb.train.scheme import SCHEMES, Exchange, Scheme, scheme_of
from smb.train.ssp import ASP, SSP
from smb.train.status import GroupStatus, status
from smb.train.work_units import Unit, WorkUnits, delete_units
from smb.train.worker import Worker, join
from smb.train.worker_status import WorkerStatus

__all__ = [
    "ASP",
    "BSP",
    "EAMSGD",
    "EASGD",
    "HSGD",
    "R2SP",
    "SCHEMES",
    "SEASGD",
    "SSP",
    "AsyncDiLoCo",
    "Collector",
    "DiLoCo",
    "Exchange",
    "ExchangeEvent",
    "GroupStatus",
    "Guards",
    "LocalSGD",
    "MembershipLostError",
    "Progress",
    "RefusedContributionError",
    "Scheme",
    "Unit",
    "WorkUnits",
    "Worker",
    "WorkerStatus",
    "delete",
    "delete_units",
    "join",
    "load",
    "nesterov_step",
    "save",
    "scheme_of",
    "shared",
    "status",
]
