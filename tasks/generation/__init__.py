"""Text that models write: options, draws, and who writes it."""

from tasks.generation.draws import row_seeds
from tasks.generation.local import LocalWriter
from tasks.generation.making import make_writer
from tasks.generation.options import GenerationOptions, greedy, read_options
from tasks.generation.samples import log_samples
from tasks.generation.server import ServerWriter
from tasks.generation.server_options import ServerOptions
from tasks.generation.writer import Writer, Written

__all__ = [
    "GenerationOptions",
    "LocalWriter",
    "ServerOptions",
    "ServerWriter",
    "Writer",
    "Written",
    "greedy",
    "log_samples",
    "make_writer",
    "read_options",
    "row_seeds",
]
