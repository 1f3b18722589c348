"""Draws the terminal of a command as docs/run.svg: the screen when a text appears.

python docs/make_picture.py --until 22/24 --columns 96 \\
    .venv/bin/python examples/code_search.py --steps 24

The command runs in a pseudo-terminal; the picture is made of its output alone. The
last lines of the screen are shown, with the command above them.
"""

import argparse
import fcntl
import os
import pty
import re
import signal
import struct
import termios
from html import escape
from pathlib import Path

PAGE = Path(__file__).with_name("run.svg")
TOKEN = re.compile(r"\x1b\[([\d;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")
COLOURS = {"36": "#2aa1b3", "0": "", "": ""}
Cell = tuple[str, str]


def output_of(command: list[str], columns: int, until: str) -> str:
    """What the command writes to its terminal, up to the line with a text."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    read = b""
    while until.encode() not in read.rpartition(b"\x1b[K")[0]:
        try:
            read += os.read(terminal, 65536)
        except OSError:
            raise SystemExit(f"the command ended without printing {until!r}") from None
    os.kill(pid, signal.SIGINT)
    while True:  # until the command has saved and ended
        try:
            if not os.read(terminal, 65536):
                break
        except OSError:
            break
    os.waitpid(pid, 0)
    return read.rpartition(b"\x1b[K")[0].decode(errors="replace")


def screen(text: str) -> list[list[Cell]]:
    """The lines of a terminal: characters with their colours."""
    lines: list[list[Cell]] = [[]]
    column, colour = 0, ""
    for number, kind, move, run in TOKEN.findall(text):
        if kind == "m":
            colour = COLOURS[number]
        elif kind == "K":
            del lines[-1][column:]
        elif move == "\r":
            column = 0
        elif move == "\n":
            lines.append([])
        for character in run:
            lines[-1][column : column + 1] = [(character, colour)]
            column += 1
    return lines


def spans(line: list[Cell]) -> str:
    """A line as SVG: a run of characters of a colour each."""
    found, start = [], 0
    for end in range(1, len(line) + 1):
        if end == len(line) or line[end][1] != line[start][1]:
            text = escape("".join(character for character, _ in line[start:end]))
            fill = f' fill="{line[start][1]}"' if line[start][1] else ""
            found.append(f"<tspan{fill}>{text}</tspan>")
            start = end
    return "".join(found)


def picture(lines: list[list[Cell]], columns: int) -> str:
    """The lines on a dark ground, in the reader's monospaced font."""
    width, height = columns * 8 + 24, len(lines) * 18 + 24
    texts = [
        f'<text x="12" y="{i * 18 + 26}" xml:space="preserve" '
        f'textLength="{len(line) * 8}">{spans(line)}</text>'
        for i, line in enumerate(lines)
        if line
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="ui-monospace, monospace" font-size="13" fill="#d8dee9">\n'
        f'<rect width="100%" height="100%" rx="6" fill="#1c2028"/>\n'
        + "\n".join(texts)
        + "\n</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--until", required=True, help="text of the screen to draw")
    parser.add_argument("--columns", type=int, default=96)
    parser.add_argument("--lines", type=int, default=12, help="drawn at most")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    text = output_of(options.command, options.columns, options.until)
    shown = screen(text)[-options.lines :]
    prompt = [(character, "") for character in "$ " + " ".join(options.command)]
    PAGE.write_text(picture([prompt, *shown], options.columns))


if __name__ == "__main__":
    main()
