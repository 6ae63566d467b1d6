//! How a copy is cut: its bytes lie in one list of stretches here and in another there, as memory is pinned in chunks.

/// Part of a copy that lies in one stretch at either end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Index of the stretch here, and where in it.
    pub here: (usize, u32),
    /// Index of the stretch there, and where in it.
    pub there: (usize, u32),
    /// How many bytes; not 0.
    pub bytes: u32,
}

/// Cuts at the borders of both lists' stretches, and so that no part has more than `limit` bytes. Both add up to the same.
pub fn cut(here: &[u32], there: &[u32], limit: u32) -> Vec<Cut> {
    let (mut cuts, mut a, mut b) = (Vec::new(), (0, 0), (0, 0));
    while let (Some(&ours), Some(&theirs)) = (here.get(a.0), there.get(b.0)) {
        let bytes = (ours - a.1).min(theirs - b.1).min(limit);
        if bytes > 0 {
            cuts.push(Cut { here: a, there: b, bytes });
        }
        a = if a.1 + bytes == ours { (a.0 + 1, 0) } else { (a.0, a.1 + bytes) };
        b = if b.1 + bytes == theirs { (b.0 + 1, 0) } else { (b.0, b.1 + bytes) };
    }
    cuts
}

/// Cuts `bytes` from `offset` on at the borders of chunks: (chunk, offset of the part, bytes of the part).
pub fn chunks(offset: u64, bytes: u32, chunk_bytes: u64) -> impl Iterator<Item = (u64, u64, u32)> {
    let (mut at, end) = (offset, offset + u64::from(bytes));
    std::iter::from_fn(move || {
        let (from, chunk) = (at, at / chunk_bytes);
        at = end.min((chunk + 1) * chunk_bytes);
        // A part is at most `bytes`.
        (from < end).then(|| (chunk, from, (at - from) as u32))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        // Goal: every byte once, in order, within its stretches and the limit. Method: two random partitions of one sum.
        #[test]
        fn cuts_cover_both_lists(here in prop::collection::vec(0u32..50, 0..6), cut_at in prop::collection::vec(any::<prop::sample::Index>(), 0..5), limit in 1u32..20) {
            let total: u32 = here.iter().sum();
            let mut borders: Vec<u32> = cut_at.iter().map(|at| at.index(total as usize + 1) as u32).chain([0, total]).collect();
            borders.sort_unstable();
            let there: Vec<u32> = borders.windows(2).map(|pair| pair[1] - pair[0]).collect();
            let absolute = |list: &[u32], (index, inside): (usize, u32)| list[..index].iter().sum::<u32>() + inside;
            let mut at = 0;
            for part in cut(&here, &there, limit) {
                prop_assert_eq!((absolute(&here, part.here), absolute(&there, part.there)), (at, at));
                prop_assert!(part.here.1 + part.bytes <= here[part.here.0] && part.there.1 + part.bytes <= there[part.there.0]);
                prop_assert!((1..=limit).contains(&part.bytes));
                at += part.bytes;
            }
            prop_assert_eq!(at, total);
        }
    }

    // Goal: parts end at borders of chunks. Method: the cases.
    #[test]
    fn parts_lie_in_one_chunk() {
        let parts = |offset, bytes| chunks(offset, bytes, 10).collect::<Vec<_>>();
        assert_eq!(parts(3, 0), []);
        assert_eq!(parts(3, 7), [(0, 3, 7)]);
        assert_eq!(parts(9, 12), [(0, 9, 1), (1, 10, 10), (2, 20, 1)]);
    }
}
