//! Mode pages of one logical unit: default, changeable, current and saved values (SPC-5, 7.5; SBC-4, 6.5).
//!
//! Pages are kept as the bytes that travel, without the PS bit. What a page means for a request's way is
//! read out once, when it changes, into the unit's word.

use disk::DiskInfo;

/// Page codes.
pub(crate) mod page {
    pub const READ_WRITE_ERROR_RECOVERY: u8 = 0x01;
    pub const CACHING: u8 = 0x08;
    pub const CONTROL: u8 = 0x0a;
    pub const INFORMATIONAL_EXCEPTIONS: u8 = 0x1c;
    pub const ALL: u8 = 0x3f;
}

/// Which values MODE SENSE asks for (SPC-5, table 181).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageControl {
    Current,
    Changeable,
    Default,
    Saved,
}

/// One page.
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

    /// The bytes that MODE SENSE returns, with PS set: every page can be saved.
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
}

/// All pages of a unit, in ascending order of their codes.
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
            // AWRE and ARRE: whatever lies below reallocates
            ModePage::new(page::READ_WRITE_ERROR_RECOVERY, 0x0a, &[(2, 0xc0)], &[]),
            ModePage::new(page::CACHING, 0x12, &[(2, cache)], &[(2, cache)]),
            // TST 001b: a task set for each nexus; unrestricted reordering of SIMPLE tasks
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

    pub fn all(&self) -> &[ModePage] {
        &self.pages
    }

    pub fn page(&self, code: u8) -> Option<&ModePage> {
        self.pages.iter().find(|page| page.code == code)
    }

    fn bit(&self, code: u8, at: usize, mask: u8) -> bool {
        self.page(code).is_some_and(|page| page.bit(at, mask))
    }

    /// WCE: the volatile cache is on.
    pub fn write_cache(&self) -> bool {
        self.bit(page::CACHING, 2, CACHING_WCE)
    }

    /// D_SENSE: sense data in descriptor format.
    pub fn descriptor_sense(&self) -> bool {
        self.bit(page::CONTROL, 2, CONTROL_D_SENSE)
    }

    /// SWP: an initiator has write protected the unit.
    pub fn software_write_protect(&self) -> bool {
        self.bit(page::CONTROL, 4, CONTROL_SWP)
    }
}
