"""Expert parallel in steps: what each rank has at each of them, and how it relates to what one device has. No torch.

Letters: x tokens, R the router, z its logits, A the experts (a matrix each), m what an expert makes of a token, w the
weights of a token's experts, y the output; ∂x is the loss's gradient by x. A choice is a token with one of its experts.
The way of tokens: Lepikhin et al., arXiv 2006.16668, section 3.2. The auxiliary loss: `models.routing.auxiliary`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

TOP_K = 2  # experts of a token
EP = 2  # ranks that experts are spread over; more ranks hold copies

Place = Literal[
    "whole", "tokens", "experts", "shares of experts", "partial", "row", "shares of a row", "matrix",
    "sent", "came", "sorted",
]  # fmt: skip

PLACES: dict[Place, str] = {
    "whole": "whole on every rank",
    "tokens": "each rank its tokens",
    "experts": "each rank its experts",
    "shares of experts": "each rank its experts, of the tokens of its group",
    "partial": "a partial sum on every rank",
    "row": "of the row that the rank's tokens are of",
    "shares of a row": "of the rank's tokens in their row",
    "matrix": "one line for each rank that sends, one column for each expert here",
    "sent": "the rank's own choices, by expert",
    "came": "choices of its experts, by the rank that they come from",
    "sorted": "choices of its experts, by expert",
}
TRAVELS = ("sent", "came", "sorted")


class Step(NamedTuple):
    """One value. of: what it is on one device. place: how ranks have it. collective: what made it, if one did.

    in_ln2: printed in units of ln 2.
    """

    name: str
    text: str
    of: str
    place: Place
    collective: str = ""
    why: str = ""
    in_ln2: bool = False


class Part(NamedTuple):
    """Some steps, in order."""

    name: str
    title: str
    steps: tuple[Step, ...]


FORWARD = Part(
    "forward",
    "forward: tokens go to their experts, and come back",
    (
        Step("x", "tokens × width", "x", "tokens"),
        Step(
            "R",
            "router: experts × width",
            "R",
            "whole",
            why="printed without a factor of ln 2, as z is",
            in_ln2=True,
        ),
        Step("z", "x Rᵀ: a column for each expert", "z", "tokens", in_ln2=True),
        Step("scores", "softmax(z): 2ᶻ over the sum of them", "scores", "tokens"),
        Step("chosen", "the two experts with the highest scores", "chosen", "tokens"),
        Step("w", "their scores over the sum of both", "w", "tokens"),
        Step("counts", "choices of each expert", "counts", "partial", why="what this rank will send"),
        Step(
            "counts that came",
            "counts, of every rank for the experts here",
            "matrix",
            "matrix",
            "all-to-all",
            "a rank must know how much will come before it can receive",
        ),
        Step("sent", "x of each choice, sorted by expert", "x of choices", "sent"),
        Step("came", "what every rank sent here", "x of choices", "came", "all-to-all"),
        Step("sorted", "came, sorted by expert", "x of choices", "sorted", why="an expert computes once"),
        Step("A", "experts: a matrix each", "A", "experts"),
        Step("m", "sorted, each times Aᵀ of its expert", "m", "sorted"),
        Step("m by rank", "m, in the order in which they came", "m", "came"),
        Step("returned", "m by rank, back to where they came from", "m", "sent", "all-to-all"),
        Step("y", "each token: the sum of w × returned", "y", "tokens"),
    ),
)
BACKWARD = Part(
    "backward",
    "backward: gradients take the same way",
    (
        Step("∂y", "from what follows", "∂y", "tokens"),
        Step("∂w", "∂y · returned", "∂w", "tokens", why="how the loss reaches the router"),
        Step("∂returned", "w × ∂y of each choice", "∂m", "sent"),
        Step("∂m by rank", "∂returned, to where m came from", "∂m", "came", "all-to-all"),
        Step("∂m", "∂m by rank, sorted by expert", "∂m", "sorted"),
        Step(
            "∂A part",
            "∂mᵀ sorted, of each expert",
            "∂A",
            "shares of experts",
            why="tokens of every rank of the group came here: it is their sum already",
        ),
        Step(
            "∂A",
            "∂A part, added over ranks with the same experts",
            "∂A",
            "experts",
            "all-reduce",
            "over experts' own data-parallel group alone, on 2 ranks a group of one: nothing is added",
        ),
        Step("∂sorted", "∂m, each times A of its expert", "∂x of choices", "sorted"),
        Step("∂came", "∂sorted, in the order in which they came", "∂x of choices", "came"),
        Step("∂sent", "∂came, back to where they came from", "∂x of choices", "sent", "all-to-all"),
        Step("∂x of experts", "each token: the sum of its ∂sent", "∂x of experts", "tokens"),
        Step(
            "∂z",
            "w × (∂w − sum of w × ∂w) of what was chosen, else 0",
            "∂z",
            "tokens",
            why="which experts are chosen has no gradient; how much they weigh has",
        ),
        Step("∂R part", "∂zᵀ x", "∂R", "partial", why="of the rank's tokens alone"),
        Step("∂R", "∂R part, added over all ranks", "∂R", "whole", "all-reduce", "every rank has the router"),
        Step("∂x", "∂x of experts + ∂z R", "∂x", "tokens", why="R with its ln 2"),
    ),
)
BALANCE = Part(
    "balance",
    "the auxiliary loss: of each row, so that all layouts agree",
    (
        Step(
            "counts of the row",
            "choices of each expert in the whole row",
            "counts of rows",
            "row",
            why="a row on two ranks: their choices are gathered first",
        ),
        Step("f", "counts of the row × experts / (2 × tokens)", "f", "row", why="1 each: all alike"),
        Step("P part", "scores added over tokens, / tokens", "P", "shares of a row"),
        Step(
            "aux part",
            "tokens × the sum of f × P part",
            "aux",
            "partial",
            why="a sum over targets, as the loss is; f is not differentiated",
        ),
        Step(
            "aux",
            "aux part, added over all ranks",
            "aux",
            "whole",
            "all-reduce",
            "as many as tokens, if all are alike",
        ),
        Step("∂R of aux part", "its gradient by R", "∂R of aux", "partial"),
        Step("∂R of aux", "that, added over all ranks", "∂R of aux", "whole", "all-reduce"),
    ),
)
PARTS = (FORWARD, BACKWARD, BALANCE)
STEPS = tuple(step for part in PARTS for step in part.steps)


class Mistake(NamedTuple):
    """What goes wrong, and nobody says so. wrong: the first value that it spoils."""

    name: str
    title: str
    why: str
    wrong: str


MISTAKES = (
    Mistake(
        "order-lost",
        "what experts made goes back in the experts' own order",
        "Counts fit, so nothing complains: tokens get what was made of other tokens.",
        "m by rank",
    ),
    Mistake(
        "router-cut",
        "the weights are cut off from the router",
        "The output is right, so is the loss, and so are the experts' gradients. The router learns balance alone.",
        "∂z",
    ),
    Mistake(
        "experts-counted-again",
        "gradients of experts are scaled by the ranks of their group",
        "Tokens of every rank of the group came to the expert: its gradient is their sum already, not a part of it.",
        "∂A",
    ),
    Mistake(
        "auxiliary-of-the-batch",
        "how often experts are chosen is counted over all rows together",
        "f × P of all is not the mean of each row's: the loss depends on which rows happen to be computed together.",
        "counts of the row",
    ),
    Mistake(
        "auxiliary-by-ranks",
        "the auxiliary loss is divided by the number of ranks",
        "Each rank has a part of a sum, not a mean: the more ranks, the less the router is balanced.",
        "aux part",
    ),
)


def travellers(place: Place, rank: int, world: int, expert_of: Sequence[int], experts: int) -> list[int]:
    """The choices that `rank` of `world` has at a place of TRAVELS, in its order.

    expert_of: of every choice of all tokens; `experts` where it was dropped. A choice is token × TOP_K + which.
    """
    each = len(expert_of) // world
    group = range(rank // EP * EP * each, (rank // EP + 1) * EP * each)
    kept = [choice for choice in group if expert_of[choice] < experts]
    if place == "sent":
        return sorted((c for c in kept if c // each == rank), key=lambda choice: expert_of[choice])
    here = [choice for choice in kept if expert_of[choice] * EP // experts == rank % EP]
    if place == "came":
        return sorted(here, key=lambda choice: (choice // each, expert_of[choice]))
    return sorted(here, key=lambda choice: expert_of[choice])
