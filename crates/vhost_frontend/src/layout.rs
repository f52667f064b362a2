//! Descriptor layouts of a request; a device must accept any layout (virtio 1.3, 2.7.4.2).

/// A descriptor layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Layout {
    /// A descriptor each for header, data and status, as in Linux.
    #[default]
    Separate,
    /// One descriptor per contiguous range: header with data to write, data to read with status.
    Merged,
    /// A new descriptor after this number of bytes, at any position.
    MaxLength(u32),
}

impl Layout {
    /// Returns true if the parts of a request must be adjacent.
    pub(crate) fn is_contiguous(self) -> bool {
        self != Layout::Separate
    }

    /// Appends the parts to `elements` in this layout. Empty parts are skipped.
    pub(crate) fn split(self, parts: &[(u64, u32)], elements: &mut Vec<(u64, u32)>) {
        let parts = parts.iter().filter(|part| part.1 > 0);
        let Layout::MaxLength(bytes) = self else {
            for &(address, length) in parts {
                match elements.last_mut() {
                    Some(last)
                        if self == Layout::Merged && last.0 + u64::from(last.1) == address =>
                    {
                        last.1 += length;
                    }
                    _ => elements.push((address, length)),
                }
            }
            return;
        };
        for &(address, length) in parts {
            let mut at = 0;
            while at < length {
                let open = match elements.last_mut() {
                    Some(last)
                        if last.1 < bytes
                            && last.0 + u64::from(last.1) == address + u64::from(at) =>
                    {
                        last
                    }
                    _ => {
                        elements.push((address + u64::from(at), 0));
                        continue_with(elements)
                    }
                };
                let here = (bytes - open.1).min(length - at);
                open.1 += here;
                at += here;
            }
        }
    }
}

fn continue_with(elements: &mut [(u64, u32)]) -> &mut (u64, u32) {
    let last = elements.len() - 1;
    &mut elements[last]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(layout: Layout) -> Vec<(u64, u32)> {
        let mut elements = Vec::new();
        layout.split(&[(100, 16), (116, 10), (500, 0), (600, 4)], &mut elements);
        elements
    }

    #[test]
    fn parts_are_kept_merged_or_chopped() {
        assert_eq!(split(Layout::Separate), [(100, 16), (116, 10), (600, 4)]);
        assert_eq!(split(Layout::Merged), [(100, 26), (600, 4)]);
        let want = [(100, 7), (107, 7), (114, 7), (121, 5), (600, 4)];
        assert_eq!(split(Layout::MaxLength(7)), want);
    }
}
