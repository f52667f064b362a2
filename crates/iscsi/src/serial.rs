//! Wrapping 32-bit serial numbers (RFC 1982; RFC 7143, 4.2.2.1).

/// Returns true if `a` is before `b`.
pub const fn before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

/// Returns true if `n` is in `first..=last`. The range is empty if `last` is one before `first`.
pub const fn within(n: u32, first: u32, last: u32) -> bool {
    !before(n, first) && !before(last, n)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_holds_across_the_wrap() {
        assert!(before(0xffff_ffff, 0));
        assert!(!before(0, 0xffff_ffff));
        assert!(!before(7, 7));
        assert!(within(0, 0xffff_fff0, 3));
        assert!(!within(4, 0xffff_fff0, 3));
        assert!(!within(5, 5, 4), "an empty window");
    }
}
