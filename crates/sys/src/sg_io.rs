//! Sends SCSI commands to local devices through Linux's SG_IO: `/dev/sgN`, and block devices that are SCSI devices.
//!
//! A call blocks until the device has answered, at most for its time-out. The memory that the
//! kernel reads or fills is borrowed for the call. Tests: `tests/tests/passthrough.rs`, in a guest.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

/// `ioctl` numbers of `<scsi/sg.h>` and `<linux/fs.h>`.
const SG_IO: libc::Ioctl = 0x2285;
const SG_GET_VERSION_NUM: libc::Ioctl = 0x2282;
const BLKSECTGET: libc::Ioctl = 0x1267;

const SG_DXFER_NONE: i32 = -1;
const SG_DXFER_TO_DEV: i32 = -2;
const SG_DXFER_FROM_DEV: i32 = -3;

/// Lowest version number of interface version 3.
const VERSION_MIN: i32 = 30_000;
/// Buffer size for sense data; the length in the header is a byte.
const SENSE_MAX: usize = 252;
const SECTOR: usize = 512;

/// `struct sg_io_hdr` of `<scsi/sg.h>`.
#[repr(C)]
struct Header {
    interface_id: i32,
    dxfer_direction: i32,
    cmd_len: u8,
    mx_sb_len: u8,
    iovec_count: u16,
    dxfer_len: u32,
    dxferp: *mut libc::c_void,
    cmdp: *const u8,
    sbp: *mut u8,
    timeout: u32,
    flags: u32,
    pack_id: i32,
    usr_ptr: *mut libc::c_void,
    status: u8,
    masked_status: u8,
    msg_status: u8,
    sb_len_wr: u8,
    host_status: u16,
    driver_status: u16,
    resid: i32,
    duration: u32,
    info: u32,
}

#[cfg(target_pointer_width = "64")]
const _: () = assert!(size_of::<Header>() == 88);

/// Data transfer between memory and device.
#[derive(Debug)]
pub enum Transfer<'a> {
    /// No transfer.
    None,
    /// Data to the device.
    Out(&'a [u8]),
    /// Data from the device.
    In(&'a mut [u8]),
}

/// Result of a command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// SCSI status; undefined if `host_status` is not 0.
    pub status: u8,
    /// Transport result from the kernel: 0 if the device was reached, otherwise DID_NO_CONNECT or a similar code.
    pub host_status: u16,
    /// Sense data.
    pub sense: Vec<u8>,
    /// Bytes that were not transferred.
    pub residual: i32,
}

/// Checks that a device accepts SCSI commands.
///
/// # Errors
/// `ENOTTY` or `EINVAL` if it does not; `Unsupported` if its driver is too old.
pub fn check(device: BorrowedFd<'_>) -> io::Result<()> {
    let mut version: libc::c_int = 0;
    // SAFETY: SG_GET_VERSION_NUM writes one int, which is the size of `version`; the descriptor is open while it is borrowed.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), SG_GET_VERSION_NUM, &raw mut version) };
    match result {
        0.. if version >= VERSION_MIN => Ok(()),
        0.. => Err(io::ErrorKind::Unsupported.into()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns the transfer limit of one command in bytes, from the device's queue; `None` if there is none. `is_block`: the device is a block
/// device, which reports sectors.
pub fn transfer_max(device: BorrowedFd<'_>, is_block: bool) -> Option<usize> {
    let mut answer = [0u8; size_of::<libc::c_int>()];
    // SAFETY: BLKSECTGET writes an unsigned short for a block device and an int for `/dev/sgN`. `answer` has room for either,
    // even if the caller takes one kind for the other. The kernel writes to user memory of any alignment.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), BLKSECTGET, answer.as_mut_ptr()) };
    let most = transfer_bytes(answer, is_block);
    (result == 0 && most > 0).then_some(most)
}

/// Converts a result of BLKSECTGET to bytes.
fn transfer_bytes(answer: [u8; 4], is_block: bool) -> usize {
    let [low, high, ..] = answer;
    match is_block {
        true => usize::from(u16::from_ne_bytes([low, high])) * SECTOR,
        false => usize::try_from(i32::from_ne_bytes(answer)).unwrap_or(0),
    }
}

/// Executes a command on the device and blocks until it ends. The calling thread must block signals ([`block_signals`]): an interrupted
/// call returns to its caller while the command continues in the device.
///
/// # Errors
/// The kernel's error if the command did not reach the device.
pub fn execute(
    device: BorrowedFd<'_>,
    cdb: &[u8],
    transfer: Transfer<'_>,
    timeout: Duration,
) -> io::Result<Answer> {
    let (direction, memory, length) = match transfer {
        Transfer::None => (SG_DXFER_NONE, std::ptr::null_mut(), 0),
        // The kernel only reads it: SG_DXFER_TO_DEV.
        Transfer::Out(data) => (SG_DXFER_TO_DEV, data.as_ptr().cast_mut(), data.len()),
        Transfer::In(data) => (SG_DXFER_FROM_DEV, data.as_mut_ptr(), data.len()),
    };
    let too_long = || io::Error::from(io::ErrorKind::InvalidInput);
    let mut sense = [0u8; SENSE_MAX];
    let mut header = Header {
        interface_id: i32::from(b'S'),
        dxfer_direction: direction,
        cmd_len: u8::try_from(cdb.len()).map_err(|_| too_long())?,
        mx_sb_len: SENSE_MAX as u8,
        iovec_count: 0,
        dxfer_len: u32::try_from(length).map_err(|_| too_long())?,
        dxferp: memory.cast(),
        cmdp: cdb.as_ptr(),
        sbp: sense.as_mut_ptr(),
        timeout: u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX),
        flags: 0,
        pack_id: 0,
        usr_ptr: std::ptr::null_mut(),
        status: 0,
        masked_status: 0,
        msg_status: 0,
        sb_len_wr: 0,
        host_status: 0,
        driver_status: 0,
        resid: 0,
        duration: 0,
        info: 0,
    };
    // SAFETY: the header has the layout of `struct sg_io_hdr`. Its pointers are to memory of the lengths beside them that is
    // borrowed until the call returns: `cdb` and data-out are only read, data-in and `sense` are borrowed mutably. The kernel
    // keeps none of them once the call has returned: it copies, or unpins the pages that it pinned.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), SG_IO, &raw mut header) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    let length = usize::from(header.sb_len_wr).min(SENSE_MAX);
    Ok(Answer {
        status: header.status & 0x7e,
        host_status: header.host_status,
        sense: sense[..length].to_vec(),
        residual: header.resid,
    })
}

/// Blocks all signals for this thread, permanently; other threads receive them.
pub fn block_signals() {
    // SAFETY: `all` is a valid set after sigfillset has written it; the mask belongs to this thread only.
    unsafe {
        let mut all = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, std::ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn transfer_limit_is_an_unsigned_short_of_sectors_or_an_int_of_bytes() {
        let [low, high] = 0xffff_u16.to_ne_bytes();
        assert_eq!(transfer_bytes([low, high, 0, 0], true), 0xffff * 512);
        let bytes = 524_288_i32.to_ne_bytes();
        assert_eq!(transfer_bytes(bytes, false), 524_288);
        assert_eq!(transfer_bytes((-1_i32).to_ne_bytes(), false), 0);
    }

    #[test]
    fn non_scsi_device_is_refused() {
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(check(file.as_fd()).is_err());
        assert_eq!(transfer_max(file.as_fd(), false), None);
        let cdb = [0x12, 0, 0, 0, 36, 0];
        let mut data = [0; 36];
        let transfer = Transfer::In(&mut data);
        let done = execute(file.as_fd(), &cdb, transfer, Duration::from_secs(1));
        assert!(done.is_err());
    }
}
