//! Goal: no bytes on a disk make the SSD tier panic, serve what was not verified, or take more than its limit. Method: the input is
//! a segment file; where its first byte says so, with header, checksums and places that hold, as only a program with our format would
//! write them. The tier begins with it, looks at all it believes, and goes on to work.
#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use transfer::memory::checksum;
use transfer::pool::disk::Ssd;
use transfer::pool::disk::format::{self, Life, PAGE};
use transfer::pool::disk::io::Medium;
use transfer::pool::disk::twin::MemoryDisk;
use transfer::pool::tier::{Tier, Whose};

const LIFE: Life = Life { store: 1, number: 7, nonce: 9 };

/// Makes a batch of the pages from this one on.
fn honest_batch(bytes: &mut [u8], page: usize) {
    let Some(head) = bytes.get_mut(page * PAGE..) else { return };
    if head.len() < PAGE {
        return;
    }
    let entries = (u32::from_le_bytes([head[12], head[13], 0, 0]) as usize % 200).max(1);
    let pages = format::header_pages(entries) as usize;
    head[..8].copy_from_slice(b"pyengBAT");
    head[12..16].copy_from_slice(&(entries as u32).to_le_bytes());
    head[16..24].copy_from_slice(&LIFE.number.to_le_bytes());
    head[24..32].copy_from_slice(&LIFE.nonce.to_le_bytes());
    head[32..36].copy_from_slice(&(page as u32).to_le_bytes());
    head[36..40].copy_from_slice(&(pages as u32).to_le_bytes());
    if head.len() >= pages * PAGE {
        let sum = checksum(&head[12..pages * PAGE]);
        head[8..12].copy_from_slice(&sum.to_le_bytes());
    }
}

/// Makes a trailer of the last page.
fn honest_trailer(bytes: &mut [u8]) {
    let pages = bytes.len() / PAGE;
    let (rest, trailer) = bytes.split_at_mut((pages - 1) * PAGE);
    let entries = u32::from_le_bytes([trailer[12], trailer[13], 0, 0]) as usize % 200;
    let Some(table) = (pages as u32).checked_sub(format::footer_pages(entries)) else { return };
    trailer[..8].copy_from_slice(b"pyengFOT");
    trailer[12..16].copy_from_slice(&(entries as u32).to_le_bytes());
    trailer[16..24].copy_from_slice(&LIFE.number.to_le_bytes());
    trailer[24..32].copy_from_slice(&LIFE.nonce.to_le_bytes());
    trailer[32..36].copy_from_slice(&table.to_le_bytes());
    trailer[36..40].copy_from_slice(&checksum(&rest[table as usize * PAGE..]).to_le_bytes());
    let sum = checksum(&trailer[12..]);
    trailer[8..12].copy_from_slice(&sum.to_le_bytes());
}

fuzz_target!(|data: &[u8]| {
    let [honest, bytes @ ..] = data else { return };
    let mut bytes = bytes.to_vec();
    bytes.resize(bytes.len().next_multiple_of(PAGE).max(2 * PAGE), 0);
    if honest & 1 != 0 {
        bytes[..PAGE].copy_from_slice(format::encode_life(LIFE).bytes());
    }
    if honest & 2 != 0 {
        honest_batch(&mut bytes, 1);
    }
    if honest & 4 != 0 {
        honest_trailer(&mut bytes);
    }
    let disk = MemoryDisk::default();
    disk.allocate(3, bytes.len() as u64).expect("a disk without limits");
    disk.alter(3, |file| file.copy_from_slice(&bytes));
    let limit = (8 << 16) + 2 * PAGE as u64;
    let mut ssd = Ssd::over(vec![Arc::new(disk.clone())], limit, 0, 1, || {}).expect("a disk that works opens");
    ssd.check();
    for record in ssd.records().collect::<Vec<_>>() {
        assert_eq!(ssd.find(&record.place.key), Some(record));
        assert!(record.layout.block_bytes() <= bytes.len());
        ssd.remove(&record.place.key);
    }
    ssd.clear(Whose::Tenant(0));
    ssd.flush(1);
    for _ in 0..10 {
        ssd.poll();
        ssd.check();
    }
    assert_eq!(ssd.capacity().blocks, 0);
    drop(ssd);
    let ssd = Ssd::over(vec![Arc::new(disk)], limit, 0, 1, || {}).expect("a disk that works opens");
    assert_eq!(ssd.capacity().blocks, 0, "what was removed stays so");
});
