//! Goal: what stands in front of the bytes on a data lane never panics and is only believed whole. Method: read the bytes
//! as a header, and what they declare as its table; what is believed must be what would be encoded.
#![no_main]

use libfuzzer_sys::fuzz_target;
use transfer::wire::{ACK_BYTES, Ack, BLOCK_HEADER_BYTES, BlockHeader};

fuzz_target!(|data: &[u8]| {
    if let Some(bytes) = data.first_chunk::<ACK_BYTES>()
        && let Ok(ack) = Ack::decode(bytes)
    {
        assert_eq!(Ack::decode(&ack.encode()), Ok(ack));
    }
    if let Some(bytes) = data.first_chunk::<BLOCK_HEADER_BYTES>()
        && let Ok(header) = BlockHeader::peek(bytes)
        && let Ok(sums) = BlockHeader::verify(data)
    {
        assert_eq!(header.encode(&sums)[8..], data[8..BLOCK_HEADER_BYTES + 4 * sums.len()]);
    }
});
