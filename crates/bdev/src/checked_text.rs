//! Version, length and checksum of texts that the daemon saves: the first line of state files, and of the identity of a file.

/// Start of the first line of a checked text, and of the header of a binary state file.
pub const VERSION: &[u8; 8] = b"lunette1";

/// Returns the CRC-32C of a name, a NUL byte and the content: a copy under another name has another checksum.
pub fn checksum(name: &str, content: &[u8]) -> u32 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    digest.update(name.as_bytes());
    digest.update(&[0]);
    digest.update(content);
    digest.finalize() as u32
}

/// Returns the first line of a checked text.
pub fn check_line(name: &str, text: &[u8]) -> String {
    let (length, checksum) = (text.len(), checksum(name, text));
    format!("lunette1 length={length} crc32c={checksum:08x}\n")
}
