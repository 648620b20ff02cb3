"""For transformers' Trainer: the ranks that share a sequence get the same samples."""

from typing import Any

import torch
import torch.distributed as dist

from .parallel import SHARDED, ShardedForward


class SameSample:
    """A mixin for Trainer that gives the same samples to the ranks that share a sequence.

        class SequenceTrainer(SameSample, Trainer):
            pass

        context_parallel(model, parallel)
        SequenceTrainer(model=model, ...).train()

    accelerate gives every process different samples. With this mixin each group of ranks that share a sequence gets
    different samples, and the ranks within a group get the same samples.
    """

    model: Any
    args: Any
    accelerator: Any
    compute_loss_func: Any

    def get_train_dataloader(self) -> Any:
        smoothing = self.args.label_smoothing_factor
        if smoothing:
            raise ValueError(
                f"label_smoothing_factor={smoothing}: Trainer would compute its own loss, from whole labels and the "
                "logits of a shard. Set it to 0."
            )
        if self.compute_loss_func is not None:
            raise ValueError(
                "compute_loss_func would be given whole labels and the logits of a shard: leave it out."
            )
        return self._same(super().get_train_dataloader())  # type: ignore[misc]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self._evaluated(self._same(super().get_eval_dataloader(eval_dataset)))  # type: ignore[misc]

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return self._evaluated(self._same(super().get_test_dataloader(test_dataset)))  # type: ignore[misc]

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        if not prediction_loss_only:
            raise ValueError(
                "evaluation beyond the loss needs whole logits, and each rank has its shard of them: leave out "
                "compute_metrics, or set prediction_loss_only=True."
            )
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]

    def _sharded(self) -> ShardedForward:
        sharded = getattr(self.accelerator.unwrap_model(self.model), SHARDED, None)
        if sharded is None:
            raise ValueError(
                "SameSample is for sequences that are split over ranks: call context_parallel(model, ...) first."
            )
        return sharded

    def _same(self, loader: Any) -> Any:
        """The loader, changed to give the same samples within a group of ranks, and different samples to each group.

        A group is the ranks that share a sequence. Groups are ordered by their lowest ranks.
        """
        # Import accelerate only here, because only users of Trainer need accelerate.
        from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard

        parallel = self._sharded().parallel
        if parallel.world_size == 1:
            return loader
        members = parallel.ranks.handshake(dist.get_rank(), {"call": "SameSample"})
        lowest = torch.tensor([min(members)], device=self.accelerator.device)
        groups = sorted(set(self.accelerator.gather(lowest).tolist()))
        for sampler in (loader.batch_sampler, loader.dataset):
            if isinstance(sampler, (BatchSamplerShard, IterableDatasetShard)):
                sampler.num_processes = len(groups)
                sampler.process_index = groups.index(min(members))
                return loader
        raise ValueError(
            f"Trainer uses a {type(loader).__name__}, which cannot give the same samples to a group of ranks: pass "
            'Trainer accelerator_config={"dispatch_batches": False}.'
        )

    def _evaluated(self, loader: Any) -> Any:
        """Return the loader. Raises ValueError if the loader's last batch would be smaller than the batches before.

        Trainer would give such a last batch a wrong weight in the mean loss, because Trainer counts samples as if the
        ranks of a group had different samples.
        """
        if (
            self._sharded().parallel.world_size > 1
            and loader.total_dataset_length % loader.total_batch_size
        ):
            raise ValueError(
                f"{loader.total_dataset_length} samples are no multiple of the {loader.total_batch_size} samples of a "
                "step: the mean of their losses would not be exact. Choose another per_device_eval_batch_size (1 "
                "always fits one group)."
            )
        return loader
