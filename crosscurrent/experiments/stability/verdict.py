"""Why a run errs, told from its numbers by a few rules. The first that holds decides.

1. stable: at least 99 % of the sequences have no error.
2. never learned: at training length less than 90 % is right. Or "stopped short", if a curriculum's lengths did not grow to
   their end: what was learned may be too short to be asked. Or, if the loss covered the final answer alone, "not asked":
   nothing can be told of positions at which the model never learned to answer.
3. length dependence: within half a training length beyond the training lengths a tenth of the sequences err for the first
   time, at ten times the hazard of training length or more.
4. drift: later positions have at least twice the hazard of earlier ones, and more than chance explains (three standard
   deviations); or the hazard does not fall, and the margin falls below half of what it is at training length.
5. early errors: the other way round, the hazard falls: what has come through so far goes on.
6. slips: the hazard is the same all along.
"""

import math
from dataclasses import dataclass, field

from crosscurrent.evaluation.stability import Positions, Rate

STABLE = 0.99
LEARNED = 0.90
BEYOND = 1.5  # how far the training lengths' neighbourhood goes, in training lengths
STEEP = 10.0  # times the hazard of training length
RISING = 2.0  # times the hazard of earlier positions
SURE = 3.0  # standard deviations
MOVED = 0.10  # of a norm, to be worth a word


@dataclass(frozen=True)
class Findings:
    """A run in numbers, which `verdict` judges.

    Attributes:
        trained_position: the last position that training examples have.
        every_prefix: whether training supervised every prefix.
        chance: share of right final answers that guessing gives.
        right_trained: share right at training length.
        hazard_trained: of a first error, at training length.
        margin_trained, norm_trained: median margin before errors, and mean norm of the state, at training length.
        last_position, num_examples: of the examples that the rest is about.
        right, without_error: shares of positions and of sequences.
        erred_tenth, erred_half: by which position a tenth and half of the sequences have had an error.
        hazard_beyond: of a first error just beyond the training lengths.
        hazard_early, hazard_late: of positions with half of the chances each.
        right_after_error: share right after the first error.
        margin_end, norm_end: as above, in the last tenth of the positions.
        stopped_at: the length that a curriculum came to, if that was not its end.
        trained_length: of the examples that `right_trained` is about.
        cuts: share right with attention cut to the training length, by what is cut; where that was tried.
    """

    trained_position: int
    every_prefix: bool
    chance: float
    right_trained: float
    hazard_trained: Rate
    margin_trained: float | None
    norm_trained: float
    last_position: int
    num_examples: int
    right: float
    without_error: float
    erred_tenth: int | None
    erred_half: int | None
    hazard_beyond: Rate
    hazard_early: Rate
    hazard_late: Rate
    right_after_error: float | None
    margin_end: float | None
    norm_end: float
    stopped_at: int | None = None
    trained_length: int | None = None
    cuts: dict[str, float] = field(default_factory=dict)

    @property
    def norm_drift(self) -> float:
        """Relative change of the norm, from training length to the end."""
        return self.norm_end / self.norm_trained - 1 if self.norm_trained else 0.0

    @property
    def rescue(self) -> str | None:
        """The cut that wins back most, if that is at least half of what was lost since training length."""
        best = max(self.cuts, key=lambda part: self.cuts[part], default=None)
        if best is None or self.right_trained <= self.right:
            return None
        won = (self.cuts[best] - self.right) / (self.right_trained - self.right)
        return best if won >= 0.5 else None


def findings_of(
    trained: Positions, found: Positions, trained_position: int, every_prefix: bool, chance: float
) -> Findings:
    """The numbers of a run.

    Args:
        trained: what the model says at training length.
        found: at the length in question.
        trained_position: the last position that training examples have.
        every_prefix: whether training supervised every prefix.
        chance: share of right final answers that guessing gives.
    """
    early, late = found.halves
    return Findings(
        trained_position=trained_position,
        every_prefix=every_prefix,
        chance=chance,
        right_trained=trained.right_share,
        hazard_trained=trained.hazard(),
        margin_trained=trained.unerring_margin(trained.asked),
        norm_trained=trained.norms[trained.asked].double().mean().item(),
        last_position=int(found.asked.any(dim=0).nonzero().max()),
        num_examples=len(found.asked),
        right=found.right_share,
        without_error=found.without_error,
        erred_tenth=found.erred_by(0.1),
        erred_half=found.erred_by(0.5),
        hazard_beyond=found.hazard(trained_position + 1, math.floor(BEYOND * trained_position) + 1),
        hazard_early=early,
        hazard_late=late,
        right_after_error=found.right_after_error,
        margin_end=found.unerring_margin(found.last_tenth),
        norm_end=found.norms[found.last_tenth].double().mean().item(),
    )


@dataclass(frozen=True)
class Verdict:
    """A rule's name, and what it says of a run."""

    kind: str
    text: str


def verdict(found: Findings) -> Verdict:
    """The first rule that holds, in words, and then what happens after an error and whether attention is to blame."""
    if found.without_error >= STABLE:
        return Verdict(
            "stable", f"{_percent(found.without_error)} of the sequences have no error up to {found.last_position}."
        )
    if found.right_trained < LEARNED:
        return _not_learned(found)
    kind, text = _course(found)
    return Verdict(kind, " ".join(filter(None, (text, _aftermath(found), _blame(found)))))


def _not_learned(found: Findings) -> Verdict:
    if found.stopped_at is not None:
        return Verdict(
            "stopped short",
            f"Its training lengths grew to {found.stopped_at} only. {_percent(found.right_trained)} of the positions are "
            f"right at length {found.trained_length}.",
        )
    right = f"{_percent(found.right_trained)} of the positions are right at training length"
    if found.every_prefix:
        return Verdict("never learned", f"Only {right}, below {100 * LEARNED:.0f} %.")
    return Verdict(
        "not asked",
        f"{right}, but the loss covered the final answer alone: nothing can be told of the positions before it.",
    )


def _course(found: Findings) -> tuple[str, str]:
    beyond, trained = found.hazard_beyond, found.hazard_trained
    # One error more than were seen: no errors among few chances do not mean that there are none.
    if beyond.events >= 0.1 * found.num_examples and _value(beyond) * trained.chances >= STEEP * (trained.events + 1):
        return "length dependence", (
            f"Errors begin just beyond the training lengths, which end at {found.trained_position}: up to "
            f"{math.floor(BEYOND * found.trained_position)} the hazard of a first error is {_rate(beyond)} per position, at "
            f"training length {_rate(trained)}."
        )
    rise = _rise(found.hazard_early, found.hazard_late)
    hazards = f"from {_rate(found.hazard_early)} to {_rate(found.hazard_late)} per position"
    if rise > 0:
        return "drift", f"The hazard of a first error rises along the sequence, {hazards}. {_symptoms(found)}"
    if rise < 0:
        return "early errors", (
            f"First errors come early: their hazard falls along the sequence, {hazards}. What has come through so far goes "
            "on."
        )
    whole = Rate(
        found.hazard_early.events + found.hazard_late.events, found.hazard_early.chances + found.hazard_late.chances
    )
    slips = f"about one in {1 / _value(whole):,.0f} supervised positions"
    if _margin_falls(found):
        return "drift", f"First errors are as frequent early as late ({slips}), but: {_symptoms(found)}"
    return "slips", f"First errors come at a constant rate, {slips}."


def _rise(early: Rate, late: Rate) -> int:
    """1 if the hazard rises, -1 if it falls, 0 if neither is beyond chance."""
    events, share = early.events + late.events, late.chances / max(early.chances + late.chances, 1)
    deviation = math.sqrt(events * share * (1 - share))
    excess = late.events - events * share
    if abs(excess) < SURE * deviation or deviation == 0:
        return 0
    if _value(late) >= RISING * _value(early):
        return 1
    return -1 if _value(early) >= RISING * _value(late) else 0


def _margin_falls(found: Findings) -> bool:
    return (
        found.margin_trained is not None
        and found.margin_end is not None
        and (found.margin_end < 0.5 * found.margin_trained)
    )


def _symptoms(found: Findings) -> str:
    """What else moves along the sequence."""
    words = []
    if _margin_falls(found):
        words.append(f"before errors the median margin falls from {found.margin_trained:.1f} to {found.margin_end:.1f}")
    if abs(found.norm_drift) >= MOVED:
        words.append(f"the state's norm moves by {100 * found.norm_drift:+.0f} %")
    if not words:
        return "Neither the margin nor the state's norm shows it."
    text = " and ".join(words)
    return f"{text[0].upper()}{text[1:]}, from training length to the end."


def _aftermath(found: Findings) -> str:
    right = found.right_after_error
    if right is None:
        return ""
    if right >= LEARNED:
        return f"It recovers: {_percent(right)} is right after a first error."
    lost = "the state is lost" if right <= max(2 * found.chance, 0.05) else "it recovers in part"
    return f"After a first error {_percent(right)} is right (guessing: {_percent(found.chance)}): {lost}."


def _blame(found: Findings) -> str:
    if not found.cuts:
        return ""
    if found.rescue is not None:
        return (
            f"With the {found.rescue} attention cut to the training length {_percent(found.cuts[found.rescue])} is right, "
            f"in place of {_percent(found.right)}: that attention is to blame."
        )
    return (
        f"Cutting attention to the training length does not help (at best {_percent(max(found.cuts.values()))} right)."
    )


def _value(rate: Rate) -> float:
    return rate.value or 0.0


def _rate(rate: Rate) -> str:
    return f"{_value(rate):.2g}" if rate.events or not rate.chances else f"below {1 / rate.chances:.1g}"


def _percent(share: float) -> str:
    """Never 100 % of what is not all."""
    return "100 %" if share == 1 else f"{min(100 * share, 99.9):.1f} %"
