//! Mode pages of one logical unit: default, changeable, current and saved values (SPC-5, 7.5; SBC-4, 6.5).
//!
//! Pages are stored in wire format, without the PS bit. When a page changes, its effects on the request path are copied to the unit's word.

use block::DiskInfo;

pub(crate) mod page {
    pub const READ_WRITE_ERROR_RECOVERY: u8 = 0x01;
    pub const CACHING: u8 = 0x08;
    pub const CONTROL: u8 = 0x0a;
    pub const INFORMATIONAL_EXCEPTIONS: u8 = 0x1c;
    pub const ALL: u8 = 0x3f;
}

/// Kind of values that MODE SENSE requests (SPC-5, table 181).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageControl {
    Current,
    Changeable,
    Default,
    Saved,
}

#[derive(Clone, Debug)]
pub(crate) struct ModePage {
    pub code: u8,
    default: Vec<u8>,
    changeable: Vec<u8>,
    current: Vec<u8>,
    saved: Vec<u8>,
}

impl ModePage {
    fn new(code: u8, length: u8, default: &[(usize, u8)], changeable: &[(usize, u8)]) -> ModePage {
        let make = |values: &[(usize, u8)]| {
            let mut bytes = vec![0; usize::from(length) + 2];
            bytes[0] = code;
            bytes[1] = length;
            for &(at, value) in values {
                bytes[at] = value;
            }
            bytes
        };
        let default = make(default);
        ModePage {
            code,
            changeable: make(changeable),
            current: default.clone(),
            saved: default.clone(),
            default,
        }
    }

    /// Returns the page for MODE SENSE, with PS set: every page can be saved.
    pub fn values(&self, control: PageControl) -> Vec<u8> {
        let mut bytes = match control {
            PageControl::Current => self.current.clone(),
            PageControl::Changeable => self.changeable.clone(),
            PageControl::Default => self.default.clone(),
            PageControl::Saved => self.saved.clone(),
        };
        if let Some(first) = bytes.first_mut() {
            *first |= 0x80;
        }
        bytes
    }

    fn bit(&self, at: usize, mask: u8) -> bool {
        self.current.get(at).is_some_and(|byte| byte & mask != 0)
    }

    /// Returns the offset of the first byte with a difference in unchangeable bits.
    fn unchangeable_difference(&self, new: &[u8]) -> Option<usize> {
        let differing = self.current.iter().zip(&self.changeable).zip(new);
        // The first two bytes identify the page.
        differing
            .skip(2)
            .position(|((old, may), new)| (old ^ new) & !may != 0)
            .map(|at| at + 2)
    }
}

/// Reason why a page of a MODE SELECT parameter list is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SelectError {
    /// The list ends inside the page.
    Truncated,
    /// Offset of the invalid byte within the page.
    Field(usize),
}

/// All pages of a unit, in ascending order of page code.
#[derive(Clone, Debug)]
pub(crate) struct ModePages {
    pages: Vec<ModePage>,
}

const CACHING_WCE: u8 = 0x04;
const CONTROL_D_SENSE: u8 = 0x04;
const CONTROL_SWP: u8 = 0x08;

impl ModePages {
    pub fn new(info: &DiskInfo) -> ModePages {
        let cache = if info.write_cache { CACHING_WCE } else { 0 };
        let pages = vec![
            // AWRE and ARRE: the lower layers reallocate blocks.
            ModePage::new(page::READ_WRITE_ERROR_RECOVERY, 0x0a, &[(2, 0xc0)], &[]),
            ModePage::new(page::CACHING, 0x12, &[(2, cache)], &[(2, cache)]),
            // TST 001b: one task set per nexus; unrestricted reordering of SIMPLE tasks.
            ModePage::new(
                page::CONTROL,
                0x0a,
                &[(2, 0x20), (3, 0x10)],
                &[(2, CONTROL_D_SENSE), (4, CONTROL_SWP)],
            ),
            ModePage::new(
                page::INFORMATIONAL_EXCEPTIONS,
                0x0a,
                &[],
                &[(2, 0x08), (3, 0x0f)],
            ),
        ];
        ModePages { pages }
    }

    /// Parses one page of a MODE SELECT parameter list and makes it current. Returns the rest of the list.
    pub fn select<'a>(&mut self, list: &'a [u8], save: bool) -> Result<&'a [u8], SelectError> {
        let [code, length, ..] = *list else {
            return Err(SelectError::Truncated);
        };
        let page = self.pages.iter_mut().find(|page| page.code == code & 0x7f);
        let page = page.ok_or(SelectError::Field(0))?;
        if page.current.len() != usize::from(length) + 2 {
            return Err(SelectError::Field(1));
        }
        let (new, rest) = list
            .split_at_checked(page.current.len())
            .ok_or(SelectError::Truncated)?;
        if let Some(at) = page.unchangeable_difference(new) {
            return Err(SelectError::Field(at));
        }
        // MRIE 07h to 0Fh are reserved or vendor specific.
        if page.code == page::INFORMATIONAL_EXCEPTIONS && new.get(3).is_some_and(|mrie| *mrie > 6) {
            return Err(SelectError::Field(3));
        }
        for (current, new) in page.current.iter_mut().zip(new).skip(2) {
            *current = *new;
        }
        if save {
            page.saved.clone_from(&page.current);
        }
        Ok(rest)
    }

    /// Returns true if the current values differ.
    pub fn differ(&self, other: &ModePages) -> bool {
        self.pages
            .iter()
            .zip(&other.pages)
            .any(|(one, other)| one.current != other.current)
    }

    /// Returns true if current or saved values differ from the defaults.
    pub fn is_changed(&self) -> bool {
        let mut pages = self.pages.iter();
        pages.any(|page| page.current != page.default || page.saved != page.default)
    }

    /// Makes the saved values current, as a reset does.
    pub fn reset(&mut self) {
        for page in &mut self.pages {
            page.current.clone_from(&page.saved);
        }
    }

    /// Encodes the saved values for the store.
    pub fn encode_saved(&self) -> Vec<u8> {
        self.pages
            .iter()
            .flat_map(|page| page.saved.iter().copied())
            .collect()
    }

    /// Restores saved values. A page keeps its defaults if the disk no longer supports its saved values; the pages after it are restored.
    /// Returns false if the bytes are not a list of pages.
    pub fn restore(&mut self, saved: &[u8]) -> bool {
        let mut rest = saved;
        while let [_, length, ..] = *rest {
            let Some((page, after)) = rest.split_at_checked(usize::from(length) + 2) else {
                return false;
            };
            self.select(page, true).ok();
            rest = after;
        }
        rest.is_empty()
    }

    pub fn all(&self) -> &[ModePage] {
        &self.pages
    }

    pub fn page(&self, code: u8) -> Option<&ModePage> {
        self.pages.iter().find(|page| page.code == code)
    }

    fn bit(&self, code: u8, at: usize, mask: u8) -> bool {
        self.page(code).is_some_and(|page| page.bit(at, mask))
    }

    /// WCE: the volatile cache is enabled.
    pub fn write_cache(&self) -> bool {
        self.bit(page::CACHING, 2, CACHING_WCE)
    }

    /// D_SENSE: sense data is in descriptor format.
    pub fn descriptor_sense(&self) -> bool {
        self.bit(page::CONTROL, 2, CONTROL_D_SENSE)
    }

    /// SWP: an initiator has write-protected the unit.
    pub fn software_write_protect(&self) -> bool {
        self.bit(page::CONTROL, 4, CONTROL_SWP)
    }
}
