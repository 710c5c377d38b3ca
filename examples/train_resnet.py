"""torchvision: a ResNet-18 on images of random colours with a mark of their class, so nothing is downloaded.

torchrun --nproc-per-node 2 examples/train_resnet.py
TRIGRAM_ALGORITHM=bytegrad torchrun --nproc-per-node 2 examples/train_resnet.py
"""

import argparse

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision.models import resnet18

import trigram


class Marks(Dataset):
    """Noise of (3, 32, 32) with a bright square, whose place is the class; replace it by ImageFolder."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, place = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(index)), index % 4
        image[:, 16 * (place // 2) :, 16 * (place % 2) :][:, :16, :16] += 1.0
        return image, place


def main() -> list[float]:
    """Trains, and returns the loss of each epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16, help="images that a rank takes in a step")
    parser.add_argument("--images", type=int, default=256)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(trigram.rank() % torch.cuda.device_count())
    torch.manual_seed(7)
    data = Marks(args.images)
    sampler = DistributedSampler(data, num_replicas=trigram.world_size(), rank=trigram.rank())
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler)
    model = trigram.with_bagua(resnet18(num_classes=4).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

    losses = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for images, labels in loader:
            with torch.autocast(device, torch.bfloat16):
                loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(loss)
        schedule.step()
        losses.append(total / len(loader))
        if trigram.rank() == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
