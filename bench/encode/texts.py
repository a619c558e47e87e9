"""Made-up texts of 5 to 120 words, every length as often, the same for every server and run."""

import random

_COMMON = (  # words of a token or two
    "a the and of to in that it is was for on are with as at be this from have or by one had not but what "
    "all were when we there can an your which their said if do will each about how up out them then she "
    "many some so these would other into has more her two like him see time could no make than first been "
    "its who now people my made over did down only way find use may water long little very after words "
    "called just where most know get through back much before go good new write our used me man too any "
    "day same right look think also around another came come work three word must because does part even "
    "place well such here take why things help put years different away again off went old number great "
    "tell men say small every found still between name should home big give air line set own under read "
    "last never us left end along while might next sound below saw something thought both few those "
    "always looked show large often together asked house world going want school important until form "
    "food keep children "
)
WORDS = _COMMON.split()


def make_texts(count: int, seed: int, shortest: int = 5, longest: int = 120) -> list[str]:
    """`count` texts of `shortest` to `longest` words, uniform."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(shortest, longest))) for _ in range(count)]
