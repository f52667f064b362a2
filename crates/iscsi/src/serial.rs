//! Serial numbers of 32 bits that wrap (RFC 1982 arithmetic, RFC 7143, 4.2.2.1).

/// Is `a` before `b`?
pub const fn before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

/// Is `n` within `first..=last`? A range that is one short of `first` is empty.
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
