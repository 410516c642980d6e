"""A teacher's distributions on disk: recorded once, read by every training after that."""

from tasks.teacher_cache.key import CacheKey, CacheOptions, Reading, make_key, parse_options
from tasks.teacher_cache.opening import find_cache_problems, open_checked
from tasks.teacher_cache.reader import TeacherCache
from tasks.teacher_cache.recording import find_recording_problems, record

__all__ = [
    "CacheKey",
    "CacheOptions",
    "Reading",
    "TeacherCache",
    "find_cache_problems",
    "find_recording_problems",
    "make_key",
    "open_checked",
    "parse_options",
    "record",
]
