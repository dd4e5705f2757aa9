"""What must hold in every run, looked at every `run.check_every` steps around an update: cheap, and on by default.

  copies     what the layout says is replicated is equal: parameters, buffers, moments, learning rate, step
  ties       parameters that were one are one
  groups     every trainable parameter is in exactly one group of the optimizer, with the Spec's settings
  movement   a parameter moves if it has a gradient, and only then
  dtypes     of parameters, gradients and moments are the declared ones
  finite     no parameter and no moment holds a value that is not
  calls      all ranks of a group have called the same collectives in the same order, from the same lines

The first step of every start is looked at, and the last, and each that is saved: a broken state is not published.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from fourfold.collectives.fingerprints import Fingerprints
from fourfold.parallel.balance import correction_names
from fourfold.parallel.clip import local
from fourfold.parallel.offload import SLOTS
from fourfold.spec.errors import CheckFailed, Problem
from fourfold.train.copies import Copies, hashes, holders
from fourfold.train.optimizer import decays
from fourfold.train.schedule import learning_rate
from fourfold.train.setup import Training
from fourfold.train.streams import streams_of


class Invariants:
    """Of one rank's training, from its beginning."""

    def __init__(self, training: Training, calls: Fingerprints | None = None) -> None:
        """calls: the record of this rank's collectives, where one is kept. Collectives: none."""
        self._training, self._calls = training, calls
        self._ties = _ties(training)
        self._buffers = hashes(dict(training.model.named_buffers()))
        self._streams = self._drawn()
        self._held_until: int | None = None
        self._first = True

    def due(self, step: int, saves: bool) -> bool:
        """Whether the update of `step` (from 0) is looked at. saves: whether what comes of it is saved."""
        run = self._training.spec.run
        return saves or self._first or (step + 1) % run.check_every == 0 or step + 1 == run.steps

    @contextmanager
    def around(self, step: int, saves: bool) -> Iterator[None]:
        """Around the update of `step` (from 0), which drops the gradients.

        Collectives: those of `Fingerprints.compare` and of `Copies.compare`, where it is due.
        Raises CheckFailed with everything that does not hold on this rank, or what differs between ranks.
        """
        if not self.due(step, saves):
            yield
            return
        training = self._training
        trained = dict(training.optimizer.trained)
        named = training.named_parameters()
        before = hashes(named)
        gradients = {name: p.grad for name, p in trained.items() if p.grad is not None}
        nonzero = {name for name, g in gradients.items() if bool(local(g).any())}
        problems = list(
            _other_dtype(((n, g, training.dtype) for n, g in gradients.items()), "gradient of ", step)
        )
        skips = training.scale.skips
        gradients_of = set() if skips else set(gradients)
        yield
        after = hashes(named)
        moved = {name for name, found in after.items() if found != before[name]}
        problems += [_moved(name, step) for name in sorted(moved - gradients_of)]
        stuck = [] if skips else sorted(nonzero - moved)
        problems += [_stuck(name, step) for name in stuck if self._should_move(name, step)]
        problems += [*self._ties_and_groups(step), *self._values(step), *self._own_to_a_rank(step)]
        if problems:
            raise CheckFailed(problems)
        if self._calls is not None:
            self._calls.compare(step + 1)
        self._copies(step, after).compare(step + 1, self._held_until)
        self._held_until, self._first = step + 1, False

    def _copies(self, step: int, known: Mapping[str, str]) -> Copies:
        """Everything that is held in common, with its hash. known: those of the parameters."""
        training, copies = self._training, Copies()
        stage = training.parallel.grid.coordinate(training.joined.rank.rank)["pp"]
        named, trained = training.named_parameters(), training.optimizer.trained
        shared = training.parallel.tied.names if training.parallel.tied is not None else ()
        moments = {f"{n}.{slot}": t for n in trained for slot, t in training.optimizer.state_of(n).items()}
        known = {**known, **hashes(moments)}
        for name, parameter in named.items():
            who = f"{holders(parameter)} {'both ends' if name in shared else f'stage {stage}'}"
            held = [name, *(key for slot in (*SLOTS, "step") if (key := f"{name}.{slot}") in known)]
            copies.add(who.strip(), [(key, known[key]) for key in held])
        buffers, moving = _compared_buffers(training), set(correction_names(training.model))
        found = hashes(buffers)
        changed = [n for n in found if found[n] != self._buffers.get(n) and n not in moving]
        copies.add(f"buffers of stage {stage}", [(n, found[n]) for n in found if n not in changed])
        copies.add(f"stage {stage}", [("the names of buffers that change", " ".join(changed) or "none")])
        rate = {group["lr"] for group in training.optimizer.adamw.param_groups}
        copies.add(
            "",
            [
                ("learning rate", str(rate)),
                ("step", str(step + 1)),
                ("loss scale", repr(training.scale.value)),
            ],
        )
        return copies

    def _should_move(self, name: str, step: int) -> bool:
        """Whether AdamW's own formula changes any element: near the end of a schedule an update may be rounded away."""
        training = self._training
        asked, state = training.spec.optimizer, training.optimizer.state_of(name)
        if not state:
            return True
        count = float(state["step"])
        first = state["exp_avg"].double() / (1 - asked.betas[0] ** count)
        second = state["exp_avg_sq"].double() / (1 - asked.betas[1] ** count)
        rate = learning_rate(asked, training.spec.run.steps, step)
        held = local(training.optimizer.trained[name]).to(first.device)
        by = rate * first / (second.sqrt() + asked.eps)
        # Twice the spacing: what is rounded in fp32 on its way may fall on either side of half of it.
        return bool((by.abs() > 2 * torch.finfo(held.dtype).eps * held.double().abs()).any())

    def _ties_and_groups(self, step: int) -> Iterator[Problem]:
        training = self._training
        for names in sorted(map(sorted, self._ties - _ties(training))):
            yield _untied(names, step)
        optimizer, asked = training.optimizer, training.spec.optimizer
        groups = optimizer.adamw.param_groups
        for name, parameter in optimizer.trained.items():
            held = optimizer.held(name)
            found = [group for group in groups if any(own is held for own in group["params"])]
            decay = asked.weight_decay if decays(name, parameter) else 0.0
            wanted = {"weight_decay": decay, "betas": tuple(asked.betas), "eps": asked.eps}
            if len(found) != 1:
                yield _groups(name, step, f"it is in {len(found)} of the optimizer's groups")
            elif wrong := [key for key in wanted if _plain(found[0][key]) != wanted[key]]:
                yield _groups(
                    name, step, f"its group has {wrong[0]} = {found[0][wrong[0]]}, not {wanted[wrong[0]]}"
                )

    def _values(self, step: int) -> Iterator[Problem]:
        """Dtypes, and values that are not finite."""
        training = self._training
        named = training.named_parameters()
        floats = {n: p for n, p in named.items() if p.is_floating_point()}
        yield from _other_dtype(((n, p, training.dtype) for n, p in floats.items()), "", step)
        states = {n: training.optimizer.state_of(n) for n in training.optimizer.trained}
        moments = {
            f"{n}.{slot}": state[slot] for n, state in states.items() for slot in SLOTS if slot in state
        }
        yield from _other_dtype(((n, t, training.dtype) for n, t in moments.items()), "", step)
        for name, tensor in {**floats, **moments}.items():
            held = local(tensor)
            if not bool(torch.isfinite(held).all()):
                count = int((~torch.isfinite(held)).sum())
                yield Problem(
                    asked=f"finite values in {name} after step {step + 1}",
                    found=f"{count} of {held.numel()} on this rank are not",
                    why="nothing that is computed from it will be",
                    instead="go on from an earlier checkpoint; fourfold replay on the failure bundle shows the module",
                )

    def _drawn(self) -> dict[str, str]:
        rank = self._training.joined.rank.rank
        return hashes(streams_of(rank)) if self._training.spec.run.exact else {}

    def _own_to_a_rank(self, step: int) -> Iterator[Problem]:
        """In exact mode nothing may be drawn from a rank's own streams, or kept of its own microbatches."""
        training = self._training
        if not training.spec.run.exact:
            return
        moving = set(correction_names(training.model))
        found = hashes({n: b for n, b in training.model.named_buffers() if n not in moving})
        kept = [name for name, one in found.items() if one != self._buffers.get(name)]
        if kept:
            yield Problem(
                asked=f"the same bits on any number of ranks (run.exact = true), in step {step + 1}",
                found=f"forwards change {', '.join(kept[:5])}",
                why="they are of the microbatches that this rank has seen: how many depends on the number of ranks",
                instead="layer or group norms in place of running statistics; or --set run.exact=false",
            )
        changed = [
            name.partition(".")[2] for name, found in self._drawn().items() if found != self._streams[name]
        ]
        if changed:
            yield Problem(
                asked=f"the same bits on any number of ranks (run.exact = true), in step {step + 1}",
                found=f"the model draws from the process's random stream of {', '.join(changed)}",
                why="every rank has a stream of its own: what it gives depends on how many there are",
                instead="draws that are a function of seed, step and row, as fourfold.models.draws has them; or "
                "--set run.exact=false",
            )


def _compared_buffers(training: Training) -> dict[str, Tensor]:
    """But for running statistics, which each rank has of its own rows until the next forward."""
    own = {
        f"{prefix}.{key}".removeprefix(".")
        for prefix, module in training.model.named_modules()
        if isinstance(module, _BatchNorm)
        for key, _ in module.named_buffers(recurse=False)
    }
    return {name: buffer for name, buffer in training.model.named_buffers() if name not in own}


def _ties(training: Training) -> frozenset[frozenset[str]]:
    """Names of each parameter that has several."""
    names: dict[int, set[str]] = {}
    for name, parameter in training.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return frozenset(frozenset(of_one) for of_one in names.values() if len(of_one) > 1)


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _other_dtype(
    tensors: Iterable[tuple[str, Tensor, torch.dtype]], what: str, step: int
) -> Iterator[Problem]:
    for name, tensor, declared in tensors:
        if tensor.dtype != declared:
            yield Problem(
                asked=f"{what}{name} in {declared} in step {step + 1}",
                found=f"{tensor.dtype}",
                why="in a narrow dtype most updates are below the spacing of its numbers: they are rounded away",
                instead="no .half(), .bfloat16() or .to() on the model, its gradients or the optimizer's state",
            )


def _moved(name: str, step: int) -> Problem:
    return Problem(
        asked=f"{name} unchanged by the update of step {step + 1}: it has no gradient, or the step is skipped",
        found="other values after it",
        why="a parameter that takes no part in a step is not moved, on every layout; nor is any in a skipped one",
        instead="leave gradients of what takes no part at None, and do not change parameters beside the optimizer",
    )


def _stuck(name: str, step: int) -> Problem:
    return Problem(
        asked=f"{name} moved by the update of step {step + 1}, in which it has a gradient",
        found="not one element has changed",
        why="the optimizer updates something else, or nothing: it would never train",
        instead="replace, freeze and convert parameters before the optimizer is built, and not afterwards",
    )


def _untied(names: Iterable[str], step: int) -> Problem:
    return Problem(
        asked=f"{' and '.join(names)} one parameter, as at the beginning",
        found=f"several after step {step + 1}",
        why="each trains on half of the gradient from then on",
        instead="tie them while the model is built, and leave them so",
    )


def _groups(name: str, step: int, found: str) -> Problem:
    return Problem(
        asked=f"{name} in one group of the optimizer, with the Spec's settings, in step {step + 1}",
        found=found,
        why="left out it would not train, twice it would be updated twice, elsewhere decay otherwise",
        instead="change [optimizer] in the Spec, not the groups of a running optimizer",
    )
