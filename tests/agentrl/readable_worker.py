"""What a worker of vLLM computes with, for tests: the extension that servers have, in a vLLM that leaves the matrices
of layers as they are instead of packing them for the CPU, so that they can be read back."""

from vllm import _custom_ops

from agentrl.engines.worker.delta import checksum
from agentrl.engines.worker.extension import Extension

_custom_ops._supports_onednn = False


class Readable(Extension):
    """See :class:`agentrl.engines.worker.extension.Extension`."""

    def parameter_sums(self) -> dict[str, int]:
        """Name of a parameter or buffer of the model -> the checksum of its bytes."""
        model = self.model_runner.get_model()
        return {name: checksum(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
