//! Random sequences of changes and backups of a raw file and an image, compared with a model.

use end_to_end::{Context, Result, Rig, ensure};
use vhost_frontend::{BlkQueue, FrontEnd, Layout, Options, QueueOptions, Range, status};

use super::{BLOCK, BLOCKS, Bitmap, DISKS, SIZE, folder, raw, run, two_disks};

/// State of the random sequence: the expected content of each disk, and its checkpoints.
struct Sequence {
    rig: Rig,
    random: fastrand::Rng,
    models: [Vec<u8>; 2],
    checkpoints: [Vec<String>; 2],
    count: usize,
}

impl Sequence {
    fn new(seed: u64) -> Result<Sequence> {
        Ok(Sequence {
            rig: two_disks()?,
            random: fastrand::Rng::with_seed(seed),
            models: [vec![0; SIZE as usize], vec![0; SIZE as usize]],
            checkpoints: Default::default(),
            count: 0,
        })
    }

    /// Changes one disk or both, and the model.
    fn change(&mut self) -> Result<()> {
        for disk in self.some_disks() {
            self.change_one(disk)?;
        }
        Ok(())
    }

    fn change_one(&mut self, disk: usize) -> Result<()> {
        let socket = self.rig.socket(DISKS[disk]);
        let mut front_end = FrontEnd::connect(&socket, &Options::default())?;
        let options = QueueOptions::default();
        let layout = Layout::Separate;
        let mut queue = BlkQueue::start(&mut front_end, 0, &options, 16, 1 << 20, layout)?;
        for _ in 0..self.random.usize(1..6) {
            let model = &mut self.models[disk];
            let total = model.len() as u64 / BLOCK;
            let first = self.random.u64(..total);
            let kind = self.random.u8(0..8);
            let most = if kind < 2 { 300 } else { 6 };
            let blocks = self.random.u64(1..=most).min(total - first);
            let byte = if kind < 2 { 0 } else { self.random.u8(1..) };
            let bytes = &mut model[(first * BLOCK) as usize..][..(blocks * BLOCK) as usize];
            bytes.fill(byte);
            let range = |flags| Range {
                sector: first * BLOCK / 512,
                sectors: (blocks * BLOCK / 512) as u32,
                flags,
            };
            let ended = match kind {
                // Discarded blocks of files and images read as zeroes.
                0 => queue.discard(&[range(0)])?,
                1 => queue.write_zeroes(&[range(1)])?,
                _ => queue.write(first * BLOCK, bytes)?,
            };
            ensure!(ended == status::OK, "status {ended}");
        }
        Ok(())
    }

    /// Returns one disk or both.
    fn some_disks(&mut self) -> Vec<usize> {
        match self.random.u8(0..3) {
            2 => vec![0, 1],
            disk => vec![usize::from(disk)],
        }
    }

    /// Resizes a disk and the model. Images grow only.
    fn resize(&mut self) -> Result<()> {
        let disk = self.random.usize(..DISKS.len());
        let now = self.models[disk].len() as u64 / BLOCK;
        let least = if disk == 0 { BLOCKS / 2 } else { now };
        let size = self.random.u64(least..least.max(BLOCKS) * 2) * BLOCK;
        let words = ["disk", "resize", DISKS[disk], &size.to_string(), "--force"];
        self.rig.daemon.lunette(&words)?;
        self.models[disk].resize(size as usize, 0);
        Ok(())
    }

    /// Begins a backup of these disks, since a checkpoint that all of them have, or of everything.
    fn begin(&mut self, disks: &[usize], more: &[&str]) -> Result<String> {
        self.count += 1;
        let name = format!("c{}", self.count);
        let [first, ..] = disks else {
            return Ok(name);
        };
        let exists = |one: &&String| {
            disks
                .iter()
                .all(|disk| self.checkpoints[*disk].contains(one))
        };
        let common: Vec<&String> = self.checkpoints[*first].iter().filter(exists).collect();
        let since = match self.random.bool() {
            true => self.random.choice(common),
            false => None,
        };
        let names = disks.iter().map(|disk| DISKS[*disk]);
        let words = ["backup", "begin"].into_iter().chain(names);
        let words = words.chain(["--checkpoint", &name, "--name", &name]);
        let since = since.into_iter().flat_map(|since| ["--since", since]);
        let words: Vec<&str> = words.chain(since).chain(more.iter().copied()).collect();
        self.rig.daemon.lunette(&words)?;
        Ok(name)
    }

    /// Copies disks since any checkpoint, and compares the restored copies with the model.
    fn push(&mut self) -> Result<()> {
        let target = folder(&self.rig)?.display().to_string();
        let disks = self.some_disks();
        let name = self.begin(&disks, &["--to", &target, "--wait"])?;
        for disk in disks {
            let image = format!("backup/{}-{name}.qcow2", DISKS[disk]);
            let is_equal = raw(&self.rig, &image, "qcow2")? == self.models[disk];
            ensure!(is_equal, "{image} differs");
            self.checkpoints[disk].push(name.clone());
        }
        Ok(())
    }

    /// Exports disks, changes them, and compares the exports with the model at the start.
    fn pull(&mut self) -> Result<()> {
        let socket = self.rig.scratch.socket("backup.sock");
        let start = self.models.clone();
        let disks = self.some_disks();
        let name = self.begin(&disks, &["--pull", &format!("unix:{}", socket.display())])?;
        self.change()?;
        for disk in disks {
            let url = format!("nbd+unix:///{}?socket={}", DISKS[disk], socket.display());
            run(self.rig.scratch.files(), &["nbdcopy", &url, "pulled.raw"])?;
            let is_equal = std::fs::read(self.rig.scratch.file("pulled.raw"))? == start[disk];
            ensure!(is_equal, "{name} of {} differs", DISKS[disk]);
        }
        // No copy can continue a pulled backup, so it creates no checkpoint here.
        self.rig.daemon.lunette(&["backup", "cancel", &name])?;
        Ok(())
    }

    /// Begins a copy that takes long, and ends it early. It takes no changes from the checkpoints.
    fn leave(&mut self, is_killed: bool) -> Result<()> {
        let target = folder(&self.rig)?.display().to_string();
        let disks = self.some_disks();
        let name = self.begin(&disks, &["--to", &target, "--speed", "1K"])?;
        self.change()?;
        if is_killed {
            self.rig.daemon.kill()?;
            self.rig.daemon.start_again()?;
        } else {
            self.rig.daemon.lunette(&["backup", "cancel", &name])?;
        }
        // A disk may have had nothing to copy.
        let bitmaps = self
            .rig
            .daemon
            .lunette(&["disk", "bitmap", "list", "--json"])?;
        let bitmaps: Vec<Bitmap> = serde_json::from_str(&bitmaps)?;
        for disk in disks {
            let is_there = |one: &Bitmap| one.disk == DISKS[disk] && one.name == name;
            if bitmaps.iter().any(is_there) {
                self.checkpoints[disk].push(name.clone());
            }
        }
        Ok(())
    }

    /// Removes a checkpoint of a disk.
    fn remove(&mut self) -> Result<()> {
        let disk = self.random.usize(..DISKS.len());
        if self.checkpoints[disk].len() <= 2 {
            return Ok(());
        }
        let index = self.random.usize(..self.checkpoints[disk].len());
        let name = self.checkpoints[disk].swap_remove(index);
        let words = ["disk", "bitmap", "remove", DISKS[disk], &name];
        self.rig.daemon.lunette(&words).map(drop)
    }

    fn step(&mut self) -> Result<()> {
        match self.random.u8(0..10) {
            0..4 => self.push(),
            4 => self.pull(),
            5 => {
                self.rig.daemon.kill()?;
                self.rig.daemon.start_again()
            }
            6 => self.leave(false),
            7 => self.leave(true),
            8 => self.resize(),
            _ => self.remove(),
        }
    }
}

/// Returns the seeds in `LUNETTE_SEEDS`: `N` selects 1 to N, `A..B` selects A to B - 1.
fn seeds() -> Result<std::ops::Range<u64>> {
    let Ok(text) = std::env::var("LUNETTE_SEEDS") else {
        return Ok(1..3);
    };
    Ok(match text.split_once("..") {
        Some((from, to)) => from.parse()?..to.parse()?,
        None => 1..text.parse::<u64>()? + 1,
    })
}

/// Changes, backups of one or both disks since any checkpoint, kills, resizes, cancellations and removed checkpoints in a random order.
/// `LUNETTE_SEEDS=1000` runs more sequences, `LUNETTE_SEEDS=7..8` repeats one.
#[test]
fn restored_copies_equal_the_disks_in_random_sequences() -> Result<()> {
    for seed in seeds()? {
        let mut sequence = Sequence::new(seed)?;
        for step in 0..16 {
            let at = || format!("seed {seed}, step {step}");
            sequence.change().with_context(at)?;
            sequence.step().with_context(at)?;
        }
    }
    Ok(())
}
