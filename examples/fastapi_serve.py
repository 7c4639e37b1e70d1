"""A server that follows a trainer: FastAPI answers with the newest weights, and drops no request while they change.

    pip install fastapi uvicorn
    smb up                                             # in another terminal
    SMB_COORDINATOR=127.0.0.1:7070 uvicorn --app-dir examples fastapi_serve:app

A trainer publishes by smb.torch.Publisher(client, "policy", network()) and publisher.publish(). Each new generation is
loaded into a model of its own, beside the one that answers, and then takes its place by one assignment. A request keeps
the model that it began with. So the server has two models in memory at a time, and more if requests last longer than a
generation.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from typing import NamedTuple

import torch
from fastapi import FastAPI
from pydantic import BaseModel
from torch import nn

import smb
import smb.torch

NAME = os.environ.get("POLICY", "policy")
_log = logging.getLogger("uvicorn.error")


def network() -> nn.Module:
    """Return the model, as the trainer makes it."""
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))


class Served(NamedTuple):
    """A model that answers, and the generation of its weights."""

    model: nn.Module
    generation: int


class Question(BaseModel):
    """The body of a request."""

    inputs: list[float]


class Answer(BaseModel):
    """The body of an answer."""

    generation: int
    outputs: list[float]


def loaded(follower: smb.torch.Follower) -> Served:
    """Return the latest generation in a new model. Blocks while it is read."""
    model = network().eval()
    return Served(model, follower.load(model))


async def follow(app: FastAPI, follower: smb.torch.Follower) -> None:
    """Serve each new generation. While the cluster is away, the last one stays."""
    while True:
        try:
            await follower.wait_async()
            app.state.served = await smb.to_thread(loaded, follower)
        except smb.Error as error:
            _log.warning("generation %d stays: %s", follower.generation, error)
            await asyncio.sleep(1)


@contextlib.asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Answer requests once there is a first generation, and follow from then on."""
    client = await smb.to_thread(smb.connect)
    try:
        follower = await smb.to_thread(smb.torch.follow, client, NAME, timeout=3600)
        await follower.wait_async()
        app.state.served = await smb.to_thread(loaded, follower)
        following = asyncio.create_task(follow(app, follower))
        try:
            yield
        finally:
            following.cancel()  # ends the wait
            await asyncio.wait([following])
    finally:
        await smb.to_thread(client.close)


app = FastAPI(lifespan=lifespan)


@app.post("/answer")
def answer(question: Question) -> Answer:
    """Answer by the model that is served now. FastAPI runs this in a thread."""
    served: Served = app.state.served
    with torch.inference_mode():
        outputs = served.model(torch.tensor(question.inputs))
    return Answer(generation=served.generation, outputs=outputs.tolist())
