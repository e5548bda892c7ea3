"""A picture of throughput against batch size, with the machine's limit drawn in.

In: batch sizes, each engine's tokens a second at each, the limits. Out: an image; the file's suffix
says which kind. Both axes are logarithmic: a straight slope of one is perfect batching.
"""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter


def draw(
    path: Path, sizes: list[int], curves: dict[str, list[float]], bounds: list[float], title: str
) -> None:
    """Write the picture into `path`."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(sizes, bounds, "--", color="grey", label="limit of the machine")
    axes.fill_between(sizes, bounds, 2 * max(bounds), color="grey", alpha=0.12, linewidth=0)
    for name, rates in curves.items():
        axes.plot(sizes, rates, "o-", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(sizes)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ScalarFormatter())
    axes.set_xlim(sizes[0], sizes[-1])
    axes.set_ylim(top=2 * max(bounds))
    axes.set_xlabel("sequences at once")
    axes.set_ylabel("output tokens a second")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
