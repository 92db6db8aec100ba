"""A script that trains through the argmin, for tests that kill it, or start several of it."""

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset

import icnn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--checkpoint")
    parser.add_argument("--every", type=int)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--calm", action="store_true", help="Nothing random but the order of examples."
    )
    options = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = torch.randn(100, 4)
    y = x[:, :3].sigmoid()
    norm = None if options.calm else "batch"
    energy = icnn.PICNN(4, 3, (16, 16), x_norm=norm, positivity="softplus").to(options.device)
    loader = DataLoader(TensorDataset(x, y), options.batch, shuffle=True)
    optimizer = torch.optim.Adam(energy.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)

    def loss(energy, x, y):
        x = x if options.calm else x + 0.1 * torch.randn_like(x)
        found = icnn.argmin(energy, x, icnn.Box(), solver=icnn.BundleEntropy(max_steps=8))
        return (found.y - y).square().mean(), found

    history = icnn.fit(
        energy,
        loader,
        loss,
        epochs=options.epochs,
        optimizer=optimizer,
        schedule=schedule,
        weight_decay=0.1,
        clip=1.0,
        validation=[(x, y)],
        checkpoint=options.checkpoint,
        every=options.every,
        resume=options.checkpoint is not None,
        callbacks=[lambda run: print("epoch", run.epoch, flush=True)],
    )
    rows = [{key: row[key] for key in row if key != "seconds"} for row in history.rows]
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        torch.save({"energy": energy.state_dict(), "rows": rows, "best": history.best}, options.out)


if __name__ == "__main__":
    main()
