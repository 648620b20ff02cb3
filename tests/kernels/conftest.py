import pytest
import torch


@pytest.fixture
def gpu(monkeypatch):
    """Makes this machine look like one with a GPU: at first an A100 with a recent cuDNN, and another on request."""

    def pretend(capability=(8, 0), cudnn=92000, has_flash=True, hip=None):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: has_flash)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
        monkeypatch.setattr(torch.version, "hip", hip)

    pretend()
    return pretend
