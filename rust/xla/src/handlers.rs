//! What XLA can call. Each checks what fits what: a program that was traced with other shapes is refused.

use std::sync::OnceLock;

use kernels::{Attention, Bf16, Level, Norms, Number, Pages, Plan, RmsNorm, Rope, Sequence, Swiglu, Threads};
use linear::{Kind, PANEL, Packed, Rows, RowsMut, multiply, packed_lanes};

use crate::frame::{Buffer, Call, CallFrame, Dtype, Handler, Refused, XlaError, answer};

/// Threads of all calls in this process. XLA's own are as many, and wait meanwhile.
static THREADS: OnceLock<Threads> = OnceLock::new();

/// Starts the threads of all calls, at the first call of this function; returns how many there are.
pub fn use_threads(count: usize) -> std::io::Result<usize> {
    if let Some(threads) = THREADS.get() {
        return Ok(threads.count());
    }
    let threads = Threads::new(count)?;
    Ok(THREADS.get_or_init(|| threads).count())
}

fn threads() -> Result<&'static Threads, Refused> {
    THREADS.get().ok_or_else(|| Refused("no threads were started for these calls".to_owned()))
}

/// Makes functions of C's from functions that take a call.
macro_rules! handlers {
    ($($(#[$doc:meta])* $name:ident => $compute:ident;)*) => {
        $(
            unsafe extern "C" fn $name(frame: *mut CallFrame) -> *mut XlaError {
                // SAFETY: XLA calls it with a frame of its own.
                unsafe { answer(frame, $compute) }
            }
        )*

        /// All of them, by the name under which XLA is to know them.
        pub const HANDLERS: &[(&str, Handler)] = &[$((concat!("pyengine_", stringify!($name)), $name)),*];
    };
}

handlers! {
    multiply_layer => product;
    rms_norm => norm;
    rope_write => rope;
    swiglu => activation;
    attend => attention;
}

/// x float32 \[T, inputs\], packed weights float32 or uint32 (pairs of bfloat16) \[layers, panels, steps, PANEL\], layer
/// int32 -> float32 \[T, outputs\].
fn product(call: &Call<'_>) -> Result<(), Refused> {
    let (x, weights, out) = (call.argument(0)?, call.argument(1)?, call.result(0)?);
    let [rows, depth] = x.dims("x")?;
    let [count, outputs] = out.dims("the product")?;
    let [layers, panels, steps, panel] = weights.dims("the weights")?;
    let kind = if weights.dtype == Dtype::U32 { Kind::Bf16 } else { Kind::F32 };
    weights.expect(&[Dtype::F32, Dtype::U32], "the weights")?;
    let each = panels * steps * panel;
    if panel != PANEL || each != packed_lanes(kind, outputs, depth) || count != rows {
        return Err(Refused(format!("{:?} x {:?} -> {:?}", x.shape, weights.shape, out.shape)));
    }
    let layer = layer(&call.argument(2)?, layers)?;
    x.expect(&[Dtype::F32], "x")?;
    out.expect(&[Dtype::F32], "the product")?;
    // SAFETY: XLA keeps its arrays of these shapes during the call; nobody else writes the result. Any bits are a number.
    unsafe {
        let first = weights.data.cast::<f32>().cast_const().add(layer * each);
        let packed = Packed::new(std::slice::from_raw_parts(first, each), kind, outputs, depth);
        let x = Rows::from_raw(x.data.cast_const().cast(), rows, depth, depth);
        let out = RowsMut::from_raw(out.data.cast(), rows, outputs, outputs);
        multiply(packed, x, out, threads()?, Level::best());
    }
    Ok(())
}

/// x \[T, W\], weight \[W\], residual \[T, W\] or none; eps -> normed \[T, W\], and in place of the residual the sum.
fn norm(call: &Call<'_>) -> Result<(), Refused> {
    fn compute<T: Number>(call: &Call<'_>) -> Result<(), Refused> {
        let (x, weight, out) = (call.argument(0)?, call.argument(1)?, call.result(0)?);
        let [rows, width] = x.dims("x")?;
        let residual = if call.arguments() > 2 { Some((call.argument(2)?, call.result(1)?)) } else { None };
        same(&[("weight", &weight, &[width]), ("normed", &out, &[rows, width])])?;
        let mut stream = std::ptr::null_mut();
        if let Some((residual, sum)) = residual {
            same(&[("residual", &residual, &[rows, width]), ("stream", &sum, &[rows, width])])?;
            in_place("the residual", &residual, &sum)?;
            sum.expect(&[x.dtype], "stream")?;
            stream = sum.data.cast();
        }
        for (what, buffer) in [("weight", &weight), ("normed", &out)] {
            buffer.expect(&[x.dtype], what)?;
        }
        let step = RmsNorm::<T> {
            x: (x.data.cast_const().cast(), width),
            residual: (stream, width),
            weight: weight.data.cast_const().cast(),
            out: (out.data.cast(), width),
            rows,
            width,
            eps: call.real("eps")?,
        };
        // SAFETY: XLA keeps its arrays during the call, whose shapes were looked at, and no result is an argument but the
        // stream.
        unsafe { step.compute(threads()?, Level::best()) };
        Ok(())
    }
    match call.argument(0)?.dtype {
        Dtype::F32 => compute::<f32>(call),
        Dtype::Bf16 => compute::<Bf16>(call),
        other => Err(Refused(format!("x is {other:?}"))),
    }
}

/// gate and up \[T, 2W\] -> \[T, W\].
fn activation(call: &Call<'_>) -> Result<(), Refused> {
    fn compute<T: Number>(call: &Call<'_>) -> Result<(), Refused> {
        let (gate_up, out) = (call.argument(0)?, call.result(0)?);
        let [rows, width] = out.dims("the result")?;
        same(&[("gate and up", &gate_up, &[rows, 2 * width])])?;
        out.expect(&[gate_up.dtype], "the result")?;
        let gate_up = (gate_up.data.cast_const().cast(), 2 * width);
        let step = Swiglu::<T> { gate_up, out: (out.data.cast(), width), rows, width };
        // SAFETY: as in `norm`.
        unsafe { step.compute(threads()?, Level::best()) };
        Ok(())
    }
    match call.argument(0)?.dtype {
        Dtype::F32 => compute::<f32>(call),
        Dtype::Bf16 => compute::<Bf16>(call),
        other => Err(Refused(format!("gate and up are {other:?}"))),
    }
}

/// qkv \[T, H + 2K, D\], cache, layer, cosines and sines float32 \[T, D / 2\], slots int32 \[T\], norms of queries and keys
/// \[D\] or none; eps -> qkv with the queries rotated and cache with keys and values, both in place.
fn rope(call: &Call<'_>) -> Result<(), Refused> {
    fn compute<T: Number, C: Number>(call: &Call<'_>) -> Result<(), Refused> {
        let (qkv, cache) = (call.result(0)?, call.result(1)?);
        in_place("qkv", &call.argument(0)?, &qkv)?;
        in_place("the cache", &call.argument(1)?, &cache)?;
        let [tokens, rows, head_dim] = qkv.dims("qkv")?;
        let pages = pages::<C>(&cache, &call.argument(2)?)?;
        let (cosines, sines, slots) = (call.argument(3)?, call.argument(4)?, call.argument(5)?);
        let angles = [tokens, head_dim / 2];
        same(&[("cosines", &cosines, &angles), ("sines", &sines, &angles), ("slots", &slots, &[tokens])])?;
        cosines.expect(&[Dtype::F32], "cosines")?;
        sines.expect(&[Dtype::F32], "sines")?;
        if rows < 2 * pages.heads || head_dim != pages.head_dim || !head_dim.is_multiple_of(2) {
            return Err(Refused(format!("qkv is {:?}, the cache {:?}", qkv.shape, cache.shape)));
        }
        // SAFETY: nobody writes an argument; int32 is i32.
        let slots = unsafe { slots.numbers::<i32>(Dtype::I32, "slots")? };
        let slots: Vec<i64> = slots.iter().map(|slot| i64::from(*slot)).collect();
        let mut norms = None;
        if call.arguments() > 6 {
            let (query, key) = (call.argument(6)?, call.argument(7)?);
            same(&[("norm of queries", &query, &[head_dim]), ("norm of keys", &key, &[head_dim])])?;
            query.expect(&[qkv.dtype], "norm of queries")?;
            key.expect(&[qkv.dtype], "norm of keys")?;
            let (query, key) = (query.data.cast_const().cast(), key.data.cast_const().cast());
            norms = Some(Norms { query, key, eps: call.real("eps")? });
        }
        let step = Rope::<T, C> {
            qkv: (qkv.data.cast(), rows * head_dim, head_dim),
            tokens,
            heads: rows - 2 * pages.heads,
            pages,
            cosines: (cosines.data.cast_const().cast(), head_dim / 2),
            sines: (sines.data.cast_const().cast(), head_dim / 2),
            slots: slots.as_ptr(),
            norms,
        };
        // SAFETY: as in `norm`; a slot beyond the pages is a panic, and no two tokens have the same.
        unsafe { step.compute(threads()?, Level::best()) };
        Ok(())
    }
    match (call.argument(0)?.dtype, call.argument(1)?.dtype) {
        (Dtype::F32, Dtype::F32) => compute::<f32, f32>(call),
        (Dtype::Bf16, Dtype::U16) => compute::<Bf16, Bf16>(call),
        other => Err(Refused(format!("qkv and pages are {other:?}"))),
    }
}

/// query \[T, H, D\], cache, layer, rows int32 \[S + 1\], lengths int32 \[S\], tables int32 \[S, N\]; window (0: none) ->
/// \[T, H, D\], zeros in rows that are nobody's.
fn attention(call: &Call<'_>) -> Result<(), Refused> {
    fn compute<T: Number, C: Number>(call: &Call<'_>) -> Result<(), Refused> {
        let (query, cache, out) = (call.argument(0)?, call.argument(1)?, call.result(0)?);
        let [rows, heads, head_dim] = query.dims("the query")?;
        let pages = pages::<C>(&cache, &call.argument(2)?)?;
        same(&[("the result", &out, &[rows, heads, head_dim])])?;
        out.expect(&[query.dtype], "the result")?;
        if head_dim != pages.head_dim || pages.heads == 0 || !heads.is_multiple_of(pages.heads) {
            return Err(Refused(format!("the query is {:?}, the cache {:?}", query.shape, cache.shape)));
        }
        let (ends, lengths, tables) = (call.argument(3)?, call.argument(4)?, call.argument(5)?);
        let [count, width] = tables.dims("tables")?;
        same(&[("rows", &ends, &[count + 1]), ("lengths", &lengths, &[count])])?;
        // SAFETY: nobody writes an argument; int32 is i32.
        let (ends, lengths, tables) = unsafe {
            (
                ends.numbers::<i32>(Dtype::I32, "rows")?,
                lengths.numbers::<i32>(Dtype::I32, "lengths")?,
                tables.numbers::<i32>(Dtype::I32, "tables")?,
            )
        };
        let sequences = sequences(ends, lengths, rows)?;
        let window = usize::try_from(call.whole("window")?).ok().filter(|window| *window > 0);
        let plan = Plan::new(
            &sequences,
            tables.to_vec(),
            width,
            window,
            heads / pages.heads,
            (pages.count, pages.page_tokens),
        );
        let step = Attention::<T, C> {
            query: (query.data.cast_const().cast(), heads * head_dim, head_dim),
            out: (out.data.cast(), heads * head_dim, head_dim),
            rows,
            pages,
        };
        // SAFETY: as in `norm`.
        unsafe { step.compute(&plan, threads()?, Level::best()) };
        Ok(())
    }
    match (call.argument(0)?.dtype, call.argument(1)?.dtype) {
        (Dtype::F32, Dtype::F32) => compute::<f32, f32>(call),
        (Dtype::Bf16, Dtype::U16) => compute::<Bf16, Bf16>(call),
        other => Err(Refused(format!("query and pages are {other:?}"))),
    }
}

/// Sequences whose last rows end at `ends`.
fn sequences(ends: &[i32], lengths: &[i32], rows: usize) -> Result<Vec<Sequence>, Refused> {
    let wrong = || Refused(format!("no sequences of {rows} rows: {ends:?}, {lengths:?}"));
    let mut sequences = Vec::with_capacity(lengths.len());
    for (pair, length) in ends.windows(2).zip(lengths) {
        let number = |value: i32| usize::try_from(value).map_err(|_| wrong());
        let (row, end, length) = (number(pair[0])?, number(pair[1])?, number(*length)?);
        if row > end || end > rows || (length > 0 && end - row > length) {
            return Err(wrong());
        }
        sequences.push(Sequence { row, count: end - row, length });
    }
    Ok(sequences)
}

/// One layer of the page tensor \[layers, 2, K, P, B, D\].
fn pages<T>(cache: &Buffer<'_>, number: &Buffer<'_>) -> Result<Pages<T>, Refused> {
    let [layers, two, heads, count, page_tokens, head_dim] = cache.dims("the cache")?;
    let layer = layer(number, layers)?;
    if two != 2 || page_tokens == 0 || head_dim > kernels::WIDEST_HEAD {
        return Err(Refused(format!("the cache is {:?}", cache.shape)));
    }
    let page = page_tokens * head_dim;
    let head = count * page;
    // SAFETY: within the array, as there is such a layer.
    let first = unsafe { cache.data.cast::<T>().add(layer * 2 * heads * head) };
    Ok(Pages { first, values: heads * head, head, page, token: head_dim, heads, count, page_tokens, head_dim })
}

/// The number of a layer, if there is such a one.
fn layer(number: &Buffer<'_>, layers: usize) -> Result<usize, Refused> {
    // SAFETY: nobody writes an argument; int32 is i32.
    let numbers = unsafe { number.numbers::<i32>(Dtype::I32, "the layer")? };
    match numbers {
        [layer] if usize::try_from(*layer).is_ok_and(|layer| layer < layers) => Ok(*layer as usize),
        other => Err(Refused(format!("layer {other:?} of {layers}"))),
    }
}

/// Ok if all have these shapes.
fn same(buffers: &[(&str, &Buffer<'_>, &[usize])]) -> Result<(), Refused> {
    for (what, buffer, expected) in buffers {
        if !buffer.shape.iter().map(|size| usize::try_from(*size).ok()).eq(expected.iter().map(|size| Some(*size))) {
            return Err(Refused(format!("{what} has the shape {:?}, not {expected:?}", buffer.shape)));
        }
    }
    Ok(())
}

/// Ok if the result has the argument's memory.
fn in_place(what: &str, argument: &Buffer<'_>, result: &Buffer<'_>) -> Result<(), Refused> {
    if argument.data == result.data && argument.shape == result.shape && argument.dtype == result.dtype {
        return Ok(());
    }
    Err(Refused(format!("{what} was to be written in place: compile it with input_output_aliases")))
}
