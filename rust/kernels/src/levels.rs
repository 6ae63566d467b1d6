//! One function, compiled once for each level's instructions.

/// Makes `$name(level, ...)`, which calls `$body(...)` compiled for the level. The body is `inline(always)`, and generic in
/// the same types. The level has to be one of `Level::available()`, which is asserted.
macro_rules! compiled {
    ($(#[$doc:meta])* $vis:vis unsafe fn $name:ident<$($type:ident: $bound:path),*>($($arg:ident: $of:ty),* $(,)?) = $body:ident) => {
        $(#[$doc])*
        $vis unsafe fn $name<$($type: $bound),*>(level: linear::Level, $($arg: $of),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx2,fma")]
            unsafe fn avx512<$($type: $bound),*>($($arg: $of),*) {
                // SAFETY: the caller's promise is the same.
                unsafe { $body::<std::arch::x86_64::__m512, $($type),*>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            unsafe fn avx2<$($type: $bound),*>($($arg: $of),*) {
                // SAFETY: as above.
                unsafe { $body::<std::arch::x86_64::__m256, $($type),*>($($arg),*) }
            }
            #[cfg(target_arch = "aarch64")]
            #[target_feature(enable = "neon")]
            unsafe fn neon<$($type: $bound),*>($($arg: $of),*) {
                // SAFETY: as above.
                unsafe { $body::<std::arch::aarch64::float32x4_t, $($type),*>($($arg),*) }
            }
            debug_assert!(linear::Level::available().contains(&level));
            // SAFETY: the processor has the instructions, as only levels that are available are handed out, and the
            // caller's promise is the same.
            unsafe {
                match level {
                    #[cfg(target_arch = "x86_64")]
                    linear::Level::Avx512 => avx512($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    linear::Level::Avx2 => avx2($($arg),*),
                    #[cfg(target_arch = "aarch64")]
                    linear::Level::Neon => neon($($arg),*),
                    _ => $body::<f32, $($type),*>($($arg),*),
                }
            }
        }
    };
}

pub(crate) use compiled;
