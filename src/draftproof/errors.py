"""Every error draftproof raises on purpose, as one tree.

    DraftproofError
    ├── UsageError                 bad input: one line on stderr, exit code 2
    │   ├── PromptError            empty, undecodable or too long a prompt
    │   ├── OptionError            an option or a combination the engine refuses before the first token
    │   ├── DrafterError           a drafter that cannot serve this target (another vocabulary, no rollback)
    │   ├── ModelError             a model that cannot be used
    │   │   ├── ModelNotFoundError     no such packaged model and no such folder or file
    │   │   ├── ModelFileError         corrupt, truncated, missing or unexpected weights
    │   │   └── ArchitectureError      a model type no target can run
    │   ├── DownloadError          the package index cannot be reached, or served something else
    │   ├── StorageError           no space, no permission
    │   └── ShardError             a shard of a corpus that is missing, cut off or changed
    ├── RollbackError              a cache could not be restored; a bug of ours, never ignored
    └── EvidenceError              a broken record or run folder, or one written by a newer version

``UsageError`` carries a message that says what was wrong and what to do; the command line prints it
without a traceback. Anything outside this tree is a bug and keeps its traceback.
"""


class DraftproofError(Exception):
    """Base of every error raised on purpose."""


class UsageError(DraftproofError):
    """Wrong use or unusable input; the command line exits with code 2."""


class PromptError(UsageError):
    """The prompt is empty, not text, or does not fit the context. Shorten or fix it."""


class OptionError(UsageError):
    """An option the engine cannot honour exactly. Drop it or use stock decoding."""


class DrafterError(UsageError):
    """The drafter cannot draft for this target. Choose another drafter."""


class ModelError(UsageError):
    """The model cannot be used; see the subclasses."""


class ModelNotFoundError(ModelError):
    """Neither a packaged model nor a readable folder or GGUF file. Check the name."""


class ModelFileError(ModelError):
    """A weight file is corrupt, incomplete or holds unknown tensors. Fetch it again."""


class ArchitectureError(ModelError):
    """No target can run this model type."""


class DownloadError(UsageError):
    """The package index could not be reached or served a file with another hash."""


class StorageError(UsageError):
    """The disk is full or a folder cannot be written. Free space or set another cache folder."""


class ShardError(UsageError):
    """A shard of a corpus is missing, cut off or changed. Run the command that made it again."""


class RollbackError(DraftproofError):
    """A cache could not be restored exactly. Never caught: the decode stops."""


class EvidenceError(DraftproofError):
    """A record breaks its own invariants, or was written by a newer version of draftproof."""
