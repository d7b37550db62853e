"""Draws the pictures of the documentation: `python docs/diagrams.py` writes docs/images/*.svg.

Each picture is a list of boxes and arrows on a grid, so that it can be reviewed and changed as text. Colours work on
light and dark pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

COLOURS = {"blue": "#3f51b5", "green": "#2e7d32", "orange": "#b75a00", "grey": "#607080", "red": "#b3261e"}


@dataclass
class Picture:
    """Shapes in pixels; ``width`` and ``height`` are those of the canvas."""

    width: int
    height: int
    title: str

    def __post_init__(self) -> None:
        self.parts: list[str] = []

    def box(self, x: int, y: int, w: int, h: int, text: str, colour: str = "blue", dashed: bool = False) -> None:
        """Draw a rounded box with centred lines of text; the first is bold."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        fill = COLOURS[colour]
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="6" fill="{fill}" fill-opacity="0.12" '
            f'stroke="{fill}" stroke-width="1.5"{dash}/>'
        )
        lines = text.split("\n")
        top = y + h / 2 - (len(lines) - 1) * 9 + 5
        for number, line in enumerate(lines):
            weight = "600" if number == 0 else "400"
            self.text(x + w // 2, round(top + 18 * number), line, weight=weight)

    def text(self, x: int, y: int, text: str, anchor: str = "middle", weight: str = "400", size: int = 14) -> None:
        style = f'text-anchor="{anchor}" font-weight="{weight}" font-size="{size}"'
        self.parts.append(f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>')

    def arrow(self, x1: int, y1: int, x2: int, y2: int, text: str = "", colour: str = "grey") -> None:
        """Draw a line with a head at its end, and a label above its middle."""
        self.parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{COLOURS[colour]}" stroke-width="2" '
            f'marker-end="url(#head)"/>'
        )
        if text:
            shift = (-6, 0) if y1 == y2 else (4, 8)
            anchor = "middle" if y1 == y2 else "start"
            self.text((x1 + x2) // 2 + shift[1], (y1 + y2) // 2 + shift[0], text, anchor=anchor, size=12)

    def svg(self) -> str:
        style = (
            "text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;fill:#1f2328}"
            ".page{fill:#ffffff}@media (prefers-color-scheme:dark){.page{fill:#1e2129}text{fill:#e6e6ea}}"
        )
        head = (
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="{COLOURS["grey"]}"/></marker></defs>'
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{style}</style>",
                head,
                f'<rect class="page" width="{self.width}" height="{self.height}" rx="8"/>',
                *self.parts,
                "</svg>",
                "",
            ]
        )


def batch() -> Picture:
    """From the data set to the optimizer step, on two ranks."""
    picture = Picture(860, 330, "The journey of a batch on two ranks")
    picture.box(20, 120, 120, 70, "Data set\nsamples 0 to 7", "grey")
    for rank, (y, samples) in enumerate(((30, "0 1 | 4 5"), (220, "2 3 | 6 7"))):
        picture.arrow(140, 155, 178, y + 35)
        picture.box(180, y, 130, 70, f"Loader, rank {rank}\n{samples}")
        picture.arrow(310, y + 35, 348, y + 35)
        picture.box(350, y, 100, 70, "To device\nnon-blocking")
        picture.arrow(450, y + 35, 488, y + 35)
        picture.box(490, y, 110, 70, "Forward\nautocast")
        picture.arrow(600, y + 35, 638, y + 35)
        picture.box(640, y, 100, 70, "Backward\nscaled loss")
        picture.arrow(740, y + 35, 768, y + 35)
        picture.box(770, y, 75, 70, "Step", "green")
    picture.box(575, 135, 230, 50, "All-reduce of gradients\nlast micro batch only", "orange")
    picture.arrow(690, 100, 690, 133)
    picture.arrow(690, 220, 690, 187)
    return picture


def checkpoint() -> Picture:
    """From the ranks to a directory that is complete or absent."""
    picture = Picture(860, 300, "The journey of a checkpoint")
    for rank, y in enumerate((25, 115, 205)):
        picture.box(20, y, 130, 65, f"Rank {rank}\nits shards", "blue")
        picture.arrow(150, y + 32, 208, 147)
    picture.box(
        210,
        95,
        170,
        105,
        ".name.accel-partial\nfiles and digests,\nflushed to disk,\nthen the manifest",
        "orange",
        dashed=True,
    )
    picture.arrow(380, 147, 458, 147, "rename")
    picture.box(460, 95, 130, 105, "checkpoint_7\ncomplete", "green")
    picture.arrow(590, 147, 668, 147, "verify")
    picture.box(670, 40, 170, 80, "Same mesh\neach rank reads\nits own shards")
    picture.box(670, 170, 170, 80, "Another mesh\neach rank reads\nthe slices it needs")
    picture.text(295, 230, "killed here: the old checkpoint is still there", size=12)
    return picture


def offload() -> Picture:
    """Return a layer's weights: from the checkpoint to the device, and gone again."""
    picture = Picture(860, 290, "The journey of an offloaded weight")
    picture.box(20, 30, 150, 70, "Checkpoint on disk\nmemory-mapped", "grey")
    picture.box(20, 180, 150, 70, "RAM\nCPU layers", "grey")
    picture.arrow(170, 65, 268, 115, "read ahead")
    picture.arrow(170, 215, 268, 150)
    picture.box(270, 95, 150, 75, "Host buffer\nnext layer", "orange")
    picture.arrow(420, 132, 498, 132, "copy")
    picture.box(500, 95, 160, 75, "Device\nweights of one layer", "blue")
    picture.arrow(660, 132, 718, 132)
    picture.box(720, 95, 120, 75, "Forward\nof this layer", "green")
    picture.arrow(580, 170, 580, 218, "after the forward")
    picture.box(500, 220, 160, 50, "freed", "red", dashed=True)
    picture.text(345, 195, "while the layer before computes", size=12)
    return picture


def mesh() -> Picture:
    """Eight ranks: dp_replicate 2 x dp_shard 2 x tp 2."""
    picture = Picture(860, 330, "Eight ranks as a mesh of dp_replicate 2, dp_shard 2 and tp 2")
    for replica in range(2):
        left = 60 + 400 * replica
        picture.box(left, 50, 360, 230, "", "grey", dashed=True)
        picture.text(left + 180, 40, f"copy {replica} (dp_replicate)", weight="600")
        for shard in range(2):
            for part in range(2):
                rank = 4 * replica + 2 * shard + part
                text = f"rank {rank}\nshard {shard} of layer part {part}\nbatch {2 * replica + shard}"
                picture.box(left + 15 + 170 * part, 70 + 105 * shard, 160, 85, text, "blue" if part == 0 else "green")
    picture.text(430, 310, "a row shares layers (tp)    ·    a column shards parameters (dp_shard)", size=13)
    return picture


PICTURES = {"batch": batch, "checkpoint": checkpoint, "offload": offload, "mesh": mesh}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        Path(__file__).parent.joinpath("images", f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
