//! How XLA calls a function of somebody else's: its typed FFI, as a C header of version 0.3 has it
//! (`xla/ffi/api/c_api.h`, Apache-2.0, which XLA promises to keep for a year).
//!
//! Structs here are those of the header, in its order. Each begins with its size and a list of extensions; only what is
//! needed is named, and what stands behind it in XLA's own version is not looked at.

use std::any::Any;
use std::ffi::{CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;

/// The version that is spoken here.
const VERSION: (c_int, c_int) = (0, 3);
/// The extension that asks a handler for its version, instead of calling it.
const METADATA: c_int = 1;
/// The stage in which a handler computes.
const EXECUTE: c_int = 3;
const INVALID_ARGUMENT: c_int = 3;
const INTERNAL: c_int = 13;

/// An error, which belongs to XLA.
#[repr(C)]
pub struct XlaError {
    _opaque: [u8; 0],
}

#[repr(C)]
struct Extension {
    struct_size: usize,
    kind: c_int,
    next: *mut Extension,
}

#[repr(C)]
struct Version {
    struct_size: usize,
    extensions: *mut Extension,
    major: c_int,
    minor: c_int,
}

#[repr(C)]
struct Metadata {
    struct_size: usize,
    version: Version,
    traits: u32,
}

#[repr(C)]
struct MetadataExtension {
    base: Extension,
    metadata: *mut Metadata,
}

#[repr(C)]
struct CreateError {
    struct_size: usize,
    extensions: *mut Extension,
    message: *const c_char,
    code: c_int,
}

#[repr(C)]
struct Api {
    struct_size: usize,
    extensions: *mut Extension,
    version: Version,
    internal: *const c_void,
    create_error: unsafe extern "C" fn(*mut CreateError) -> *mut XlaError,
}

/// Arguments, or results.
#[repr(C)]
struct List {
    struct_size: usize,
    extensions: *mut Extension,
    size: i64,
    types: *const c_int,
    values: *const *const c_void,
}

#[repr(C)]
struct Attributes {
    struct_size: usize,
    extensions: *mut Extension,
    size: i64,
    types: *const c_int,
    names: *const *const Text,
    values: *const *const c_void,
}

#[repr(C)]
struct Text {
    first: *const c_char,
    length: usize,
}

#[repr(C)]
struct Scalar {
    dtype: c_int,
    value: *const c_void,
}

#[repr(C)]
struct RawBuffer {
    struct_size: usize,
    extensions: *mut Extension,
    dtype: c_int,
    data: *mut c_void,
    rank: i64,
    dims: *const i64,
}

/// One call.
#[repr(C)]
pub struct CallFrame {
    struct_size: usize,
    extensions: *mut Extension,
    api: *const Api,
    context: *mut c_void,
    stage: c_int,
    arguments: List,
    results: List,
    attributes: Attributes,
}

/// What XLA is given: an address of such a function.
pub type Handler = unsafe extern "C" fn(*mut CallFrame) -> *mut XlaError;

/// Types of numbers, as XLA numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// Signed, 32 bits.
    I32,
    /// 16 bits that XLA does not interpret: pages of bfloat16 on CPUs.
    U16,
    /// 32 bits that XLA does not interpret: pairs of packed bfloat16.
    U32,
    /// 32 bits.
    F32,
    /// The upper half of those.
    Bf16,
}

impl Dtype {
    fn of(number: c_int) -> Option<Self> {
        Some(match number {
            4 => Dtype::I32,
            7 => Dtype::U16,
            8 => Dtype::U32,
            11 => Dtype::F32,
            16 => Dtype::Bf16,
            _ => return None,
        })
    }

    fn size(self) -> usize {
        match self {
            Dtype::U16 | Dtype::Bf16 => 2,
            Dtype::I32 | Dtype::U32 | Dtype::F32 => 4,
        }
    }
}

/// An array: dense, the last axis innermost.
#[derive(Clone, Copy, Debug)]
pub struct Buffer<'a> {
    /// What it holds.
    pub dtype: Dtype,
    /// Its first number.
    pub data: *mut c_void,
    /// Its axes.
    pub shape: &'a [i64],
}

/// Why a call is refused; the text says what does not fit.
pub struct Refused(pub String);

impl Buffer<'_> {
    /// The sizes of its axes.
    pub fn dims<const N: usize>(&self, what: &str) -> Result<[usize; N], Refused> {
        let wrong = || Refused(format!("{what} has the shape {:?}, not {N} axes", self.shape));
        let shape: [i64; N] = self.shape.try_into().map_err(|_| wrong())?;
        let mut dims = [0; N];
        for (to, from) in dims.iter_mut().zip(shape) {
            *to = usize::try_from(from).map_err(|_| wrong())?;
        }
        Ok(dims)
    }

    /// Its numbers, if they are of this type.
    ///
    /// # Safety
    ///
    /// T has the layout of the type, and nobody writes them meanwhile.
    pub unsafe fn numbers<T: Copy>(&self, dtype: Dtype, what: &str) -> Result<&[T], Refused> {
        self.expect(&[dtype], what)?;
        assert_eq!(size_of::<T>(), dtype.size());
        let count: i64 = self.shape.iter().product();
        let count = usize::try_from(count).map_err(|_| Refused(format!("{what} has {count} numbers")))?;
        if count == 0 {
            return Ok(&[]);
        }
        // SAFETY: XLA has as many numbers there, aligned; by the caller's promise they are of this type.
        Ok(unsafe { std::slice::from_raw_parts(self.data.cast::<T>().cast_const(), count) })
    }

    /// Ok if it holds one of these.
    pub fn expect(&self, dtypes: &[Dtype], what: &str) -> Result<(), Refused> {
        if dtypes.contains(&self.dtype) && self.data.addr().is_multiple_of(self.dtype.size()) {
            return Ok(());
        }
        Err(Refused(format!("{what} is {:?} at {:p}, not {dtypes:?}", self.dtype, self.data)))
    }
}

/// A call that computes.
pub struct Call<'a>(&'a CallFrame);

impl Call<'_> {
    /// Argument number `index`.
    pub fn argument(&self, index: usize) -> Result<Buffer<'_>, Refused> {
        buffer(&self.0.arguments, index, "argument")
    }

    /// How many arguments there are.
    pub fn arguments(&self) -> usize {
        usize::try_from(self.0.arguments.size).unwrap_or(0)
    }

    /// Result number `index`: where to write it.
    pub fn result(&self, index: usize) -> Result<Buffer<'_>, Refused> {
        buffer(&self.0.results, index, "result")
    }

    /// A number that was given when the program was compiled.
    pub fn setting<T: Copy>(&self, name: &str, dtype: c_int) -> Result<T, Refused> {
        let attributes = &self.0.attributes;
        let size = usize::try_from(attributes.size).unwrap_or(0);
        for index in 0..size {
            // SAFETY: XLA has `size` names, types and values; a value of type 3 is a scalar.
            unsafe {
                let text = &**attributes.names.add(index);
                let own = std::slice::from_raw_parts(text.first.cast::<u8>(), text.length);
                if own == name.as_bytes() && *attributes.types.add(index) == 3 {
                    let scalar = &*(*attributes.values.add(index)).cast::<Scalar>();
                    if scalar.dtype == dtype {
                        return Ok(scalar.value.cast::<T>().read_unaligned());
                    }
                }
            }
        }
        Err(Refused(format!("there is no setting {name:?} of type {dtype}")))
    }

    /// A setting of 64 bits.
    pub fn whole(&self, name: &str) -> Result<i64, Refused> {
        self.setting(name, 5)
    }

    /// A setting in float32.
    pub fn real(&self, name: &str) -> Result<f32, Refused> {
        self.setting(name, 11)
    }
}

fn buffer<'a>(list: &'a List, index: usize, what: &str) -> Result<Buffer<'a>, Refused> {
    let size = usize::try_from(list.size).unwrap_or(0);
    if index >= size {
        return Err(Refused(format!("there is no {what} number {index}, there are {size}")));
    }
    // SAFETY: XLA has `size` types and values, and a value of type 1 is a buffer; it has `rank` sizes.
    unsafe {
        if *list.types.add(index) != 1 {
            return Err(Refused(format!("{what} number {index} is no array")));
        }
        let raw = &*(*list.values.add(index)).cast::<RawBuffer>();
        let rank = usize::try_from(raw.rank).unwrap_or(0);
        let shape = if rank == 0 { &[][..] } else { std::slice::from_raw_parts(raw.dims, rank) };
        let dtype = Dtype::of(raw.dtype)
            .ok_or_else(|| Refused(format!("{what} number {index} is of a type that is not known: {}", raw.dtype)))?;
        Ok(Buffer { dtype, data: raw.data, shape })
    }
}

/// Answers one call of XLA's: tells the version, or computes. A panic becomes an error too.
///
/// # Safety
///
/// `frame` is XLA's, and there for as long as the call takes.
pub unsafe fn answer(frame: *mut CallFrame, compute: fn(&Call<'_>) -> Result<(), Refused>) -> *mut XlaError {
    // SAFETY: by the caller's promise.
    unsafe {
        let mut extension = (*frame).extensions;
        while let Some(one) = extension.as_ref() {
            if one.kind == METADATA {
                let metadata = (*extension.cast::<MetadataExtension>()).metadata;
                ((*metadata).version.major, (*metadata).version.minor) = VERSION;
                (*metadata).traits = 0;
                return null_mut();
            }
            extension = one.next;
        }
        let frame = &*frame;
        if frame.stage != EXECUTE {
            return null_mut();
        }
        match catch_unwind(AssertUnwindSafe(|| compute(&Call(frame)))) {
            Ok(Ok(())) => null_mut(),
            Ok(Err(Refused(text))) => error(frame, &text, INVALID_ARGUMENT),
            Err(panic) => error(frame, &said(&*panic), INTERNAL),
        }
    }
}

/// An error of XLA's own.
///
/// # Safety
///
/// `frame` is XLA's.
unsafe fn error(frame: &CallFrame, text: &str, code: c_int) -> *mut XlaError {
    let message = CString::new(text.replace('\0', " ")).unwrap_or_default();
    let mut arguments =
        CreateError { struct_size: size_of::<CreateError>(), extensions: null_mut(), message: message.as_ptr(), code };
    // SAFETY: XLA's function, which copies the text.
    unsafe { ((*frame.api).create_error)(&mut arguments) }
}

fn said(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_else(|| "a panic".to_owned())
}
