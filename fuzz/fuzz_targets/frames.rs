//! Goal: what stands in front of the bytes on a lane never panics, never makes more memory than it has bytes, and is only
//! believed whole. Method: the bytes as header and table; where the first byte says so, with checksums that hold, as a
//! hostile peer would send them. What was believed is encoded again and must be the same bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use transfer::memory::checksum;
use transfer::transport::lanes::frames::{
    Flags, HEADER_BYTES, Kind, Table, encode, fence_table, outcome_byte, parse_header, parse_table, put_entry, put_place, put_sums,
    region_table,
};

fuzz_target!(|data: &[u8]| {
    let [honest, bytes @ ..] = data else { return };
    let mut bytes = bytes.to_vec();
    let Some(head) = bytes.first_chunk::<HEADER_BYTES>() else { return };
    let mut head = *head;
    if honest & 1 == 1 {
        let table = u32::from_le_bytes([head[32], head[33], head[34], head[35]]) as usize;
        if let Some(table) = bytes[HEADER_BYTES..].get(..table) {
            head[36..40].copy_from_slice(&checksum(table).to_le_bytes());
        }
        head[..4].copy_from_slice(b"pyLN");
        let sum = checksum(&head[8..]);
        head[4..8].copy_from_slice(&sum.to_le_bytes());
        bytes[..HEADER_BYTES].copy_from_slice(&head);
    }
    let Ok(header) = parse_header(&head) else { return };
    let Some(table) = bytes[HEADER_BYTES..].get(..header.table as usize) else { return };
    let Ok(parsed) = parse_table(&header, table) else { return };

    let mut again = Vec::new();
    match parsed {
        Table::Write { entries, places, sums } => {
            assert_eq!(entries.len(), header.count as usize);
            for (index, entry) in entries.iter().enumerate() {
                put_entry(&mut again, entry);
                if let Some(place) = places.get(index) {
                    put_place(&mut again, place);
                }
            }
            put_sums(&mut again, &sums);
        }
        Table::Read { entries } => entries.iter().for_each(|entry| put_entry(&mut again, entry)),
        Table::Ack { outcomes } => again.extend(outcomes.into_iter().map(outcome_byte)),
        Table::Data { outcomes, places, sums } => {
            assert_eq!(outcomes.len(), header.count as usize);
            again.extend(outcomes.into_iter().map(outcome_byte));
            places.iter().for_each(|place| put_place(&mut again, place));
            put_sums(&mut again, &sums);
        }
        Table::Release => {}
        Table::Region(shared) => again = region_table(&shared),
        Table::Fence { paths } => again = fence_table(&paths),
        // Text that was no UTF-8 is shown all the same.
        Table::Refuse(_) => return,
    }
    // A place has four bytes that must be zero but are not looked at.
    if !(header.flags.has(Flags::SHARED) && matches!(header.kind, Kind::Write | Kind::Data)) {
        assert_eq!(again, table);
        let whole = encode(header.kind, header.flags, header.count as usize, header.sequence, header.body, table);
        assert_eq!(whole, bytes[..HEADER_BYTES + table.len()]);
    }
});
