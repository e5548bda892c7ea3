"""Rotary positions of a prompt with images: three a token, given from outside.

Text counts on by one on all axes; the patches of an image share a time, and have their row and
column. Behind the prompt all axes go on from the largest position that it has:

    token      a  b  [ 2 x 2 image ]  c  d | e
    time       0  1   2  2  2  2      4  5 | 6
    height     0  1   2  2  3  3      4  5 | 6
    width      0  1   2  3  2  3      4  5 | 6
"""

import numpy as np

NUM_AXES = 3  # time, height, width


class ImagePositions:
    """`given`: [3, n] int64, of the prompt's n tokens."""

    def __init__(self, given: np.ndarray) -> None:
        self._given = given
        self._offset = int(given.max()) + 1 - given.shape[1]

    def of(self, start: int, stop: int) -> np.ndarray:
        """Of tokens start .. stop: [3, n], or [n] behind the prompt, where all axes are one."""
        num_given = self._given.shape[1]
        text = np.arange(max(start, num_given), max(stop, num_given), dtype=np.int64)
        text += self._offset
        if start >= num_given:
            return text
        on_all_axes = np.broadcast_to(text, (NUM_AXES, len(text)))
        return np.concatenate((self._given[:, start:stop], on_all_axes), 1)

    def key(self, start: int, stop: int) -> bytes:
        """What tells a block of these tokens from one of the same ids elsewhere."""
        return self.of(start, stop).tobytes()


def join(
    images: list[ImagePositions | None], places: np.ndarray, starts: np.ndarray, lens: np.ndarray
) -> np.ndarray:
    """Positions of a step's tokens: [T], or [3, T] where some token's axes differ.

    places [T]: where each token is in its sequence, which is its position where images has None.
    starts, lens [S]: each sequence's first token in the step, and how many follow.
    """
    if not any(images):
        return places
    ends = np.cumsum(lens)
    parts = [
        places[end - n : end] if image is None else image.of(start, start + n)
        for image, start, n, end in zip(images, starts, lens, ends, strict=True)
    ]
    if any(part.ndim == 2 for part in parts):
        parts = [np.broadcast_to(part, (NUM_AXES, part.shape[-1])) for part in parts]
    return np.concatenate(parts, axis=-1)
