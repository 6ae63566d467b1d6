//! Questions about one prefix.

use crate::changes::{DEVICE, DRAM, SSD, TIERS};
use crate::index::{Index, Place};
use crate::table::Holders;
use crate::{Key, Life, Slot, hash};

const ANY: u8 = 1 << DEVICE | 1 << DRAM | 1 << SSD;
/// Up to so many holders are looked at one by one; more are bits.
const FEW: usize = 8;

/// Blocks `first` to `last` (exclusive) of a prefix that a holder has on one medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Whose.
    pub slot: Slot,
    /// From here.
    pub first: usize,
    /// Up to here.
    pub last: usize,
    /// Where.
    pub tier: u8,
}

/// Finds one block of a prefix after the other: most stand behind the one before.
struct Walk<'a> {
    index: &'a Index,
    keys: std::slice::Iter<'a, Key>,
    last: Option<usize>,
}

impl<'a> Walk<'a> {
    fn new(index: &'a Index, keys: &'a [Key], first: usize) -> Self {
        Self { index, keys: keys.get(first..).unwrap_or_default().iter(), last: None }
    }

    /// The next block, if there is one that anybody whom we see has.
    fn next(&mut self) -> Option<Holders<'a>> {
        let (key, table) = (self.keys.next()?, &self.index.table);
        let behind = self.last.and_then(|last| table.behind(last, key));
        let place = behind.or_else(|| table.find(key, hash(key)))?;
        self.last = Some(place);
        let holders = table.holders(place);
        (self.index.unseen == 0 || self.index.seen_at(holders)).then_some(holders)
    }
}

/// Who has had all blocks so far.
enum Alive {
    /// Anybody may.
    All,
    /// Life, where it has the latest one, and how many of them on SSD only.
    Few(Vec<(Life, u8, u32)>),
    /// Bits of lives. planes: counters of all of them at once, bit k of each in planes\[k\]. slow: some of them have the
    /// latest block on SSD only.
    Many { mask: Vec<u64>, planes: Vec<Vec<u64>>, slow: bool },
}

impl Index {
    fn seen_at(&self, holders: Holders<'_>) -> bool {
        let seen = |life: Life| self.seen[usize::from(life) / 64] >> (life % 64) & 1 == 1;
        match holders {
            Holders::Few(cells) => cells.iter().take_while(|&&cell| cell != 0).any(|&cell| seen(cell >> 3)),
            Holders::Many(bits) => {
                let words = bits.len() / TIERS;
                bits.iter().enumerate().any(|(at, bits)| bits & self.seen[at % words] != 0)
            }
        }
    }

    /// Bits of the lives we see that have a block on any of these tiers.
    fn mark(&self, holders: Holders<'_>, tiers: u8, mask: &mut [u64]) {
        mask.fill(0);
        holders.mark(tiers, mask);
        if self.unseen > 0 {
            mask.iter_mut().zip(&self.seen).for_each(|(mask, seen)| *mask &= seen);
        }
    }

    /// How much of the prefix each slot has: leading blocks, and how many of them on SSD only; rows are zero before.
    /// Returns how many leading blocks anybody has.
    pub fn find_matches(&self, keys: &[Key], held: &mut [i64], ssd: &mut [i64]) -> usize {
        let mut alive = Alive::All;
        let mut walk = Walk::new(self, keys, 0);
        // Whose holders those alive were last compared with.
        let mut before = None;
        let mut scratch = Vec::new();
        let mut best = 0;
        while let Some(holders) = walk.next() {
            let at = best;
            best += 1;
            let same = before == Some(holders);
            before = Some(holders);
            match (&mut alive, holders) {
                (Alive::All, Holders::Few(cells)) => {
                    let seen = |life: Life| self.seen[usize::from(life) / 64] >> (life % 64) & 1 == 1;
                    let few = cells.iter().take_while(|&&cell| cell != 0).filter(|&&cell| seen(cell >> 3));
                    let few = few.map(|cell| (cell >> 3, *cell as u8 & 7));
                    alive = Alive::Few(few.map(|(life, tiers)| (life, tiers, u32::from(tiers == 1 << SSD))).collect());
                }
                (Alive::All, Holders::Many(_)) => {
                    let mut mask = vec![0; self.seen.len()];
                    self.mark(holders, ANY, &mut mask);
                    scratch.resize(mask.len(), 0);
                    let mut planes = Vec::new();
                    let slow = count(holders, &mask, &mut planes, &mut scratch);
                    alive = self.fewer(holders, mask, planes, slow);
                }
                // Most blocks have the holders of the one before them.
                (Alive::Few(few), _) if same => {
                    few.iter_mut().for_each(|(_, tiers, count)| *count += u32::from(*tiers == 1 << SSD));
                }
                (Alive::Few(few), holders) => few.retain_mut(|(life, tiers, count)| {
                    *tiers = holders.tiers(*life);
                    if *tiers == 0 {
                        let slot = self.slot_of(*life);
                        (held[slot], ssd[slot]) = (at as i64, i64::from(*count));
                        return false;
                    }
                    *count += u32::from(*tiers == 1 << SSD);
                    true
                }),
                (Alive::Many { mask, planes, slow }, _) if same => {
                    if *slow {
                        count(holders, mask, planes, &mut scratch);
                    }
                }
                (Alive::Many { mask, planes, slow }, holders) => {
                    scratch.resize(mask.len(), 0);
                    self.mark(holders, ANY, &mut scratch);
                    let mut left = 0;
                    for word in 0..mask.len() {
                        let gone = mask[word] & !scratch[word];
                        mask[word] &= scratch[word];
                        left += mask[word].count_ones() as usize;
                        for life in bits(word, gone) {
                            let slot = self.slot_of(life);
                            (held[slot], ssd[slot]) = (at as i64, counted(planes, life));
                        }
                    }
                    *slow = count(holders, mask, planes, &mut scratch);
                    if left <= FEW {
                        alive = self.fewer(holders, std::mem::take(mask), std::mem::take(planes), *slow);
                    }
                }
            }
        }
        match alive {
            Alive::All => {}
            Alive::Few(few) => {
                for (life, _, count) in few {
                    let slot = self.slot_of(life);
                    (held[slot], ssd[slot]) = (best as i64, i64::from(count));
                }
            }
            Alive::Many { mask, planes, .. } => {
                for life in mask.iter().enumerate().flat_map(|(word, &left)| bits(word, left)) {
                    let slot = self.slot_of(life);
                    (held[slot], ssd[slot]) = (best as i64, counted(&planes, life));
                }
            }
        }
        best
    }

    /// One by one, if there are few. holders: of the latest block.
    fn fewer(&self, holders: Holders<'_>, mask: Vec<u64>, planes: Vec<Vec<u64>>, slow: bool) -> Alive {
        if mask.iter().map(|word| word.count_ones() as usize).sum::<usize>() > FEW {
            return Alive::Many { mask, planes, slow };
        }
        let lives = mask.iter().enumerate().flat_map(|(word, &left)| bits(word, left));
        Alive::Few(lives.map(|life| (life, holders.tiers(life), counted(&planes, life) as u32)).collect())
    }

    /// Who has the block on any medium, in the order of slots.
    pub fn holders(&self, key: &Key) -> Vec<Slot> {
        let mut mask = vec![0; self.seen.len()];
        if let Some(holders) = self.find(key) {
            self.mark(holders, ANY, &mut mask);
        }
        self.in_order(&mask)
    }

    /// This one has it on any medium.
    pub fn holds(&self, node: &str, key: &Key) -> bool {
        let life = self.life(node);
        life.is_some_and(|life| self.find(key).is_some_and(|holders| holders.tiers(life) != 0))
    }

    fn find(&self, key: &Key) -> Option<Holders<'_>> {
        self.table.find(key, hash(key)).map(|place| self.table.holders(place))
    }

    fn in_order(&self, mask: &[u64]) -> Vec<Slot> {
        let lives = mask.iter().enumerate().flat_map(|(word, &left)| bits(word, left));
        let mut slots: Vec<_> = lives.map(|life| self.slot_of(life)).collect();
        slots.sort_unstable();
        slots
    }

    fn mask_of<'a>(&self, nodes: impl IntoIterator<Item = &'a str>) -> Vec<u64> {
        let mut mask = vec![0; self.seen.len()];
        for life in nodes.into_iter().filter_map(|node| self.life(node)) {
            mask[usize::from(life) / 64] |= 1 << (life % 64);
        }
        mask
    }

    /// Who but those to avoid supplies the blocks from `first` on from DRAM or SSD.
    pub fn runs<'a>(&self, keys: &[Key], first: usize, avoid: impl IntoIterator<Item = &'a str>) -> Vec<Run> {
        let avoid = self.mask_of(avoid);
        let words = avoid.len();
        let (mut dram, mut disk) = (vec![0; words], vec![0; words]);
        let (mut alive, mut still) = (vec![0; words], vec![0; words]);
        let mut runs: Vec<Run> = Vec::new();
        let mut open: Option<Run> = None;
        let mut walk = Walk::new(self, keys, first);
        let mut at = first;
        while let Some(holders) = walk.next() {
            self.mark(holders, 1 << DRAM, &mut dram);
            self.mark(holders, 1 << SSD, &mut disk);
            dram.iter_mut().zip(&avoid).for_each(|(mask, avoid)| *mask &= !avoid);
            disk.iter_mut().zip(&avoid).for_each(|(mask, avoid)| *mask &= !avoid);
            let some = dram.iter().any(|&bits| bits != 0);
            if let Some(run) = &mut open {
                let on = if run.tier == DRAM { &dram } else { &disk };
                still.iter_mut().zip(alive.iter().zip(on)).for_each(|(still, (alive, on))| *still = alive & on);
                if still.iter().any(|&bits| bits != 0) && !(run.tier == SSD && some) {
                    std::mem::swap(&mut alive, &mut still);
                    at += 1;
                    run.last = at;
                    continue;
                }
                run.slot = self.in_order(&alive)[0];
                runs.push(*run);
                open = None;
            }
            let (tier, from) = if some { (DRAM, &dram) } else { (SSD, &disk) };
            if from.iter().all(|&bits| bits == 0) {
                break;
            }
            alive.copy_from_slice(from);
            at += 1;
            open = Some(Run { slot: 0, first: at - 1, last: at, tier });
        }
        if let Some(mut run) = open {
            run.slot = self.in_order(&alive)[0];
            runs.push(run);
        }
        runs
    }

    /// Who but those to avoid has the run's blocks on its medium from the first on, and up to which; in the order of
    /// slots.
    pub fn shared<'a>(&self, keys: &[Key], run: Run, avoid: impl IntoIterator<Item = &'a str>) -> Vec<(Slot, usize)> {
        let avoid = self.mask_of(avoid);
        let (mut alive, mut still) = (vec![0; avoid.len()], vec![0; avoid.len()]);
        let mut ends = Vec::new();
        let mut walk = Walk::new(self, &keys[..run.last.min(keys.len())], run.first);
        for at in run.first..run.last {
            match walk.next() {
                Some(holders) => self.mark(holders, 1 << run.tier, &mut still),
                None => still.fill(0),
            }
            if at == run.first {
                alive.iter_mut().zip(still.iter().zip(&avoid)).for_each(|(alive, (on, avoid))| *alive = on & !avoid);
            } else {
                for (word, (alive, on)) in alive.iter_mut().zip(&still).enumerate() {
                    ends.extend(bits(word, *alive & !on).map(|life| (self.slot_of(life), at)));
                    *alive &= on;
                }
            }
            if alive.iter().all(|&bits| bits == 0) {
                break;
            }
        }
        ends.extend(self.in_order(&alive).into_iter().map(|slot| (slot, run.last)));
        ends.sort_unstable();
        ends
    }

    /// Where the block stands, if this one has it and nobody else but the others.
    pub fn only_at<'a>(&self, key: &Key, node: &'a str, others: impl IntoIterator<Item = &'a str>) -> Option<Place> {
        let here = self.life(node)?;
        let place = self.table.find(key, hash(key))?;
        let mut mask = vec![0; self.seen.len()];
        self.mark(self.table.holders(place), ANY, &mut mask);
        let has = mask[usize::from(here) / 64] >> (here % 64) & 1 == 1;
        let known = self.mask_of(others.into_iter().chain([node]));
        let entry = self.table.entry(place);
        let alone = has && mask.iter().zip(&known).all(|(mask, known)| mask & !known == 0);
        alone.then_some(Place { parent: entry.parent, position: entry.position })
    }

    /// Runs of blocks that only this one's SSD has of all its media.
    pub fn only_on_ssd(&self, keys: &[Key], node: &str) -> Vec<(usize, usize)> {
        let mut runs: Vec<(usize, usize)> = Vec::new();
        let Some(life) = self.life(node) else { return runs };
        for (at, key) in keys.iter().enumerate() {
            if self.find(key).is_some_and(|holders| holders.tiers(life) == 1 << SSD) {
                match runs.last_mut() {
                    Some(run) if run.1 == at => run.1 = at + 1,
                    _ => runs.push((at, at + 1)),
                }
            }
        }
        runs
    }
}

/// Adds one to the counters of those in the mask that have it on SSD only. Returns whether there are any.
fn count(holders: Holders<'_>, mask: &[u64], planes: &mut Vec<Vec<u64>>, carry: &mut [u64]) -> bool {
    carry.fill(0);
    holders.mark(1 << SSD, carry);
    if carry.iter().all(|&bits| bits == 0) {
        return false;
    }
    let mut elsewhere = vec![0; carry.len()];
    holders.mark(ANY & !(1 << SSD), &mut elsewhere);
    for (carry, (mask, elsewhere)) in carry.iter_mut().zip(mask.iter().zip(&elsewhere)) {
        *carry &= mask & !elsewhere;
    }
    let some = carry.iter().any(|&bits| bits != 0);
    for k in 0.. {
        if carry.iter().all(|&bits| bits == 0) {
            break;
        }
        if k == planes.len() {
            planes.push(vec![0; carry.len()]);
        }
        for (plane, carry) in planes[k].iter_mut().zip(carry.iter_mut()) {
            (*plane, *carry) = (*plane ^ *carry, *plane & *carry);
        }
    }
    some
}

fn counted(planes: &[Vec<u64>], life: Life) -> i64 {
    let (word, bit) = (usize::from(life) / 64, life % 64);
    planes.iter().enumerate().map(|(k, plane)| ((plane[word] >> bit & 1) as i64) << k).sum()
}

/// Lives of the bits that are set in this word.
fn bits(word: usize, mut left: u64) -> impl Iterator<Item = Life> {
    std::iter::from_fn(move || {
        (left != 0).then(|| {
            let life = (word * 64) as Life + left.trailing_zeros() as Life;
            left &= left - 1;
            life
        })
    })
}
