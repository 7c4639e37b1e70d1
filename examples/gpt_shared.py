"""The training of gpt.py, shared by all processes that run this: they divide the batches, and may come and go.

Run it on each host: SMB_COORDINATOR=HOST:PORT python examples/gpt_shared.py

`--steps` is about the batches divided by the processes: the schedule counts the steps of one process.
"""

from __future__ import annotations

from gpt import BATCH, learn, load, look, loss_of, prepare

import smb.torch


def main() -> None:
    """Learn all batches once; evaluate at the end."""
    options, rows, unseen, model, optimizer, schedule = prepare()
    done = load(options.checkpoint, model, optimizer, schedule)
    shared = smb.torch.join(model, optimizer, options.name, scheme="diloco", every=options.every)
    shared.catch_up(schedule)
    batches = shared.batches(len(rows), BATCH, epochs=1)
    for step, batch in enumerate(batches, done + 1):
        learn(model, optimizer, rows[batch])
        schedule.step()
        look(model, optimizer, schedule, step, unseen, options)
    shared.close()
    print(f"loss {loss_of(model, unseen):.4f}", flush=True)


if __name__ == "__main__":
    main()
