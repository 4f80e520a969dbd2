"use strict";
function planPage() { return { parts: [], ready() {}, redraw() {} }; }
