"""Reads images from a dmfs mount as from any directory: nothing in it knows of dmfs.

dmfs mount /lustre/datasets/imagenet /tmp/imagenet --cache /local/scratch/dmfs:400GiB
python train_pytorch.py /tmp/imagenet/train
dmfs umount /tmp/imagenet
"""

import sys
import time

from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder


def main() -> None:
    """Read the set for three epochs, in a new random order each, and print how fast it came."""
    prepare = transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor()])
    images = ImageFolder(sys.argv[1], transform=prepare)
    loader = DataLoader(images, batch_size=64, shuffle=True, num_workers=4)
    for epoch in range(1, 4):
        began = time.monotonic()
        for _pixels, _labels in loader:
            pass  # the model's step comes here
        print(f"epoch {epoch}: {len(images) / (time.monotonic() - began):,.0f} images/s")


if __name__ == "__main__":
    main()
