"""Text that models write: options, draws, and who writes it."""

from tasks.generation.draws import row_seeds
from tasks.generation.local import LocalWriter
from tasks.generation.making import make_writer
from tasks.generation.options import GenerationOptions, greedy, read_options
from tasks.generation.samples import log_samples
from tasks.generation.server import ServerWriter
from tasks.generation.server_options import SERVER_PLACE, ServerOptions, find_folder_problems
from tasks.generation.writer import Writer, Written

__all__ = [
    "SERVER_PLACE",
    "GenerationOptions",
    "LocalWriter",
    "ServerOptions",
    "ServerWriter",
    "Writer",
    "Written",
    "find_folder_problems",
    "greedy",
    "log_samples",
    "make_writer",
    "read_options",
    "row_seeds",
]
