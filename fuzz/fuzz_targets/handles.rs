//! Goal: a region handle, which may come by any way, is what its engine made or is refused; no bytes panic. Method: the
//! bytes as they are, and with a checksum that holds; what is believed is made again and must be the same bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use transfer::endpoint::RegionHandle;
use transfer::memory::checksum;

fuzz_target!(|data: &[u8]| {
    let _ = RegionHandle::from_bytes(data);
    if data.len() >= 8 {
        let mut bytes = data.to_vec();
        bytes[..4].copy_from_slice(b"pyRH");
        let sum = checksum(&bytes[8..]);
        bytes[4..8].copy_from_slice(&sum.to_le_bytes());
        if let Ok(handle) = RegionHandle::from_bytes(&bytes) {
            assert_eq!(RegionHandle::from_bytes(&handle.to_bytes()), Ok(handle));
        }
    }
});
