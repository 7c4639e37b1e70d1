"""The former name of smb.torch.vllm.trainer, for programs that import it. It uses nothing else. Needs vLLM 0.26."""

from smb.torch.vllm.trainer import SmbTrainerInitInfo as SmbTrainerInitInfo
from smb.torch.vllm.trainer import SmbTrainerWeightTransferEngine as SmbTrainerWeightTransferEngine
