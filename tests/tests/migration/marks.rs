//! Data that a guest has written before its end, read without a guest.

use end_to_end::{Guest, Result, Rig, ensure};
use vhost_frontend::{
    BlkQueue, FrontEnd, Layout, Options, QueueOptions, ScsiQueue, ScsiRequest, status,
};

/// Length of the data at the begin of a disk. READ(10) reads them in blocks of 512 bytes.
const LENGTH: usize = 64 << 10;

/// Fills the begin of each disk with a letter.
pub fn write(guest: &mut Guest, disks: &[(&str, char)]) -> Result<()> {
    for (disk, letter) in disks {
        guest.ok(&format!(
            "head -c {LENGTH} /dev/zero | tr '\\0' {letter} >/tmp/mark && dd if=/tmp/mark of=/dev/{disk} bs={LENGTH} oflag=direct"
        ))?;
    }
    Ok(())
}

/// Reads the disk of a virtio-blk export.
pub fn ensure_blk(rig: &Rig, export: &str, letter: char) -> Result<()> {
    let mut front_end = FrontEnd::connect(&rig.socket(export), &Options::default())?;
    let options = QueueOptions::default();
    let mut queue = BlkQueue::start(&mut front_end, 0, &options, 1, LENGTH, Layout::Separate)?;
    let mut data = vec![0; LENGTH];
    let done = queue.read(0, &mut data)?;
    ensure!(done == status::OK, "{export}: status {done}");
    ensure_letter(export, &data, letter)?;
    front_end.stop_queue(0)?;
    Ok(())
}

/// Reads a logical unit of target 0 of a virtio-scsi export.
pub fn ensure_scsi(rig: &Rig, export: &str, lun: u16, letter: char) -> Result<()> {
    const FIRST_REQUEST: u16 = 2;
    const CHECK_CONDITION: u8 = 2;
    let mut front_end = FrontEnd::connect(&rig.socket(export), &Options::default())?;
    let options = QueueOptions::default();
    let layout = Layout::Separate;
    let mut queue = ScsiQueue::start(&mut front_end, FIRST_REQUEST, &options, 1, LENGTH, layout)?;
    let [high, low] = ((LENGTH / 512) as u16).to_be_bytes();
    let request = ScsiRequest {
        target: 0,
        lun,
        tag: 1,
        cdb: &[0x28, 0, 0, 0, 0, 0, 0, high, low, 0],
    };
    let mut data = vec![0; LENGTH];
    let mut done = queue.run(&request, &[], &mut data)?;
    if done.status == CHECK_CONDITION {
        // Unit attention of the new nexus.
        done = queue.run(&request, &[], &mut data)?;
    }
    ensure!(
        (done.response, done.status) == (0, 0),
        "{export}/0:{lun}: {done:?}"
    );
    ensure_letter(export, &data, letter)?;
    front_end.stop_queue(FIRST_REQUEST)?;
    Ok(())
}

fn ensure_letter(export: &str, data: &[u8], letter: char) -> Result<()> {
    let other = data.iter().position(|byte| char::from(*byte) != letter);
    ensure!(other.is_none(), "{export} has not {letter} at {other:?}");
    Ok(())
}
