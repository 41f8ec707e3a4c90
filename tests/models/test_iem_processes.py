"""The first phase in two processes, with the candidates of both and with each one's own."""

from pathlib import Path

import torch
from torch import multiprocessing
from torch.nn.parallel import DistributedDataParallel

from tests.models.test_iem import batch, criterion, first_phase, small_task


def _one_process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    for gather in (True, False):
        torch.manual_seed(3)
        task = small_task()
        inner = first_phase(2)
        model = DistributedDataParallel(inner)
        # fairseq's wrapper hands attributes of the module through.
        vars(model).update(segmentation=inner.segmentation, update=0)
        # The processes have different numbers of candidates.
        sample = batch(task, [[1, 2, 3], [4]][rank])
        loss, _, logged = criterion(task, gather_negatives=gather)(model, sample)
        loss.backward()
        # Averaged by DDP, so half of the sum.
        gradients = [2 * grad for parameter in inner.parameters() if (grad := parameter.grad) is not None]
        torch.save((gradients, loss.detach(), int(logged["negatives"])), f"{folder}/{gather}{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_give_the_gradient_of_the_joint_batch(tmp_path: Path) -> None:
    torch.manual_seed(3)
    task = small_task()
    model = first_phase(2)
    loss, _, logged = criterion(task)(model, batch(task, [1, 2, 3, 4]))
    expected = torch.autograd.grad(loss, list(model.parameters()))
    multiprocessing.spawn(_one_process, (str(tmp_path),), nprocs=2)
    for gather in (True, False):
        found = [torch.load(tmp_path / f"{gather}{rank}.pt", weights_only=True) for rank in range(2)]
        same_loss = torch.isclose(found[0][1] + found[1][1], loss, rtol=1e-12, atol=0.0)
        assert bool(same_loss) == gather, "each process sees all candidates, if asked to"
        assert (found[0][2] + found[1][2] == int(logged["negatives"])) == gather
        if gather:
            for one, other, joint in zip(found[0][0], found[1][0], expected, strict=True):
                assert torch.equal(one, other)
                torch.testing.assert_close(one, joint, rtol=1e-10, atol=1e-12)
