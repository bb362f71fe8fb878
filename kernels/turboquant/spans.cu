// Rotated rows for attention: eight numbers of `rows.cu` at once, loaded ahead of what is made of them.

template <int F, int S>
struct TurnedSpan {
    using Kept = Turned<F, S>;
    using Raw = typename Kept::Raw;
    static constexpr int WIDTH = Kept::WIDTH;

    static DEVICE Raw load(const u8* row, int octet) { return Kept::load_raw(row, octet); }

    static DEVICE void read(const Raw& raw, int octet, float (&out)[OCTET]) { Kept::numbers(raw, OCTET * octet, out); }
};

template <int S> struct Span<TQ_KEY, S, true, true> : TurnedSpan<TQ_KEY, S> {};
template <int S> struct Span<TQ3, S, true, true> : TurnedSpan<TQ3, S> {};
template <int S> struct Span<TQ_VALUE, S, false, true> : TurnedSpan<TQ_VALUE, S> {};
